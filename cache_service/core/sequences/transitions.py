"""The states of a sequence, and which state may follow which, as data.

SequenceTable checks every change of a state against TRANSITIONS. FREE_SLOT stands for a slot without a sequence.
"""

from ..values.errors import WrongState
from ..values.types import SequenceState

_FREE, _WAITING, _RUNNING = SequenceState.FREE_SLOT, SequenceState.WAITING, SequenceState.RUNNING
_LOADING, _SWAPPED = SequenceState.LOADING, SequenceState.SWAPPED

TRANSITIONS: dict[tuple[SequenceState, SequenceState], str] = {
    (_FREE, _WAITING): "created",
    (_FREE, _RUNNING): "forked from a running sequence",
    (_WAITING, _RUNNING): "started",
    (_WAITING, _LOADING): "started on blocks that only the host tier holds",
    (_RUNNING, _SWAPPED): "swapped out",
    (_SWAPPED, _LOADING): "swapped in, blocks are loaded",
    (_SWAPPED, _RUNNING): "swapped in before its device blocks were given up, or its swap-out failed",
    (_LOADING, _RUNNING): "all loads have ended",
    (_LOADING, _SWAPPED): "a load of its swap-in failed",
    (_WAITING, _FREE): "released",
    (_RUNNING, _FREE): "released",
    (_SWAPPED, _FREE): "released",
    (_LOADING, _FREE): "released",
}


def wrong_state(sequence_id: int, state: int) -> WrongState:
    """The refusal of a call that a sequence in this state cannot have."""
    name = SequenceState(state).name
    return WrongState(f"sequence {sequence_id} is {name}", sequence_id=sequence_id, state=name)
