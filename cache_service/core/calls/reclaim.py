"""Giving back what sessions that ended still hold, in slices.

Owns nothing but the size of the first slice; the ended sessions stand in PoolState. A session of a million blocks would keep
all others waiting if it were given back in one go. Rules: no call reaches such a sequence any more; its blocks count as
referenced until its turn comes, so every audit holds between two slices; a sequence is given back whole.
"""

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..tables.lifecycle import SequenceLifecycle
from ..values.types import SequenceState

AT_ONCE = 4096  # blocks, a few milliseconds


class Reclaim:
    """Works off the ended sessions of one pool."""

    def __init__(self, state: PoolState, lifecycle: SequenceLifecycle) -> None:
        self.at_once = AT_ONCE  # blocks given back with the end of a session; fewer never wait
        self._ended = state.ended_sessions
        self._sequences = state.sequences
        self._publisher = state.publisher
        self._lifecycle = lifecycle

    @property
    def is_left(self) -> bool:
        """Whether an ended session still holds blocks."""
        return bool(self._ended)

    def add_ended(self, owner: SessionState) -> None:
        """The session has ended. Its running sequences are given back, `at_once` blocks now; everything else at once."""
        slots = owner.ids.items()[1]
        self._publisher.forget_slots(slots.tolist())
        self._lifecycle.release(owner, slots[self._sequences.states[slots] != SequenceState.RUNNING].tolist())
        if len(owner.ids):
            self._ended.append(owner)
        self.release_blocks(self.at_once)

    def release_blocks(self, max_blocks: int) -> bool:
        """Gives back about so many blocks, one sequence or more. Whether any are left."""
        seqs = self._sequences
        while self._ended and max_blocks > 0:
            owner = self._ended[0]
            slots = owner.ids.items()[1]
            ends = np.cumsum(-(-seqs.num_reserved[slots] // seqs.block_size))
            count = max(1, int(np.searchsorted(ends, max_blocks, side="right")))
            self._lifecycle.release(owner, slots[:count].tolist())
            if count >= len(slots):
                self._ended.popleft()
            max_blocks -= int(ends[min(count, len(ends)) - 1])
        return bool(self._ended)
