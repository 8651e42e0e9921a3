"""The states of a sequence and the transitions between them: one table, and the one function that sets a state.

A sequence is born NEW, as the first of its request or with tokens of its own, or UNFORKED, as a continuation; of a request that
is started over also ENDED, where it had ended before. A new session starts everything that
lives again, because its cache service knows no sequence of the one before. ENDED is final. Pure.
"""

from ..values.request import Sequence, SequenceState

_S = SequenceState

TRANSITIONS: dict[tuple[SequenceState, SequenceState], str] = {
    (_S.UNFORKED, _S.RUNNING): "forked from its parent",
    (_S.UNFORKED, _S.NEW): "its parent cannot be forked: it starts alone",
    (_S.NEW, _S.RUNNING): "taken over with its blocks",
    (_S.NEW, _S.CREATING): "the cache service is being told of it",
    (_S.CREATING, _S.WAITING): "the cache service knows it",
    (_S.CREATING, _S.NEW): "no slot was free, or the session is new",
    (_S.WAITING, _S.RUNNING): "started",
    (_S.WAITING, _S.LOADING): "started; its hits are in the host tier",
    (_S.WAITING, _S.NEW): "the session is new",
    (_S.LOADING, _S.RUNNING): "its hits are on the device",
    (_S.LOADING, _S.NEW): "the session is new",
    (_S.RUNNING, _S.LEAVING): "preempted",
    (_S.RUNNING, _S.NEW): "the session is new",
    (_S.LEAVING, _S.SWAPPED): "swapped out",
    (_S.LEAVING, _S.NEW): "released, or the session is new: it is computed again",
    (_S.SWAPPED, _S.RETURNING): "swapped in",
    (_S.SWAPPED, _S.NEW): "a transfer failed, or the session is new: it is computed again",
    (_S.RETURNING, _S.RUNNING): "its blocks are on the device",
    (_S.RETURNING, _S.NEW): "a transfer failed, or the session is new: it is computed again",
    **{(state, _S.ENDED): "finished, cancelled or given up" for state in _S if state is not _S.ENDED},
}


def move_to(sequence: Sequence, state: SequenceState) -> None:
    """Set a sequence's state. Nothing else does."""
    assert (sequence.state, state) in TRANSITIONS, f"{sequence.state.name} -> {state.name}"
    sequence.state = state
