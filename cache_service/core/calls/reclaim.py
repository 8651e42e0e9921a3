"""Giving back what sessions that ended still hold, in slices.

Owns the owners whose session is gone while some of their sequences are not: a session of a million blocks would keep everybody
else waiting if all were given back in one go. Rules: nobody reaches such a sequence any more; its blocks count as referenced
until its turn comes, so every audit holds between two slices; a sequence is given back whole.
"""

from collections import deque

import numpy as np

from ..sequences.session_state import SessionState
from ..tables.lifecycle import SequenceLifecycle
from ..values.types import SequenceState

AT_ONCE = 4096  # blocks, a few milliseconds


class Reclaim:
    """See the module."""

    def __init__(self, tables: SequenceLifecycle) -> None:
        self.owners: deque[SessionState] = deque()
        self.at_once = AT_ONCE  # blocks given back with the end of a session; what is less than that never waits
        self._tables = tables

    def end(self, owner: SessionState) -> None:
        """The session is gone. What runs is given back from now on, as far as `at_once` goes; everything else at once."""
        seqs, slots = self._tables.sequences, owner.ids.items()[1]
        self._tables.publisher.forget_slots(slots.tolist())
        self._tables.release(owner, slots[seqs.states[slots] != SequenceState.RUNNING].tolist())
        if len(owner.ids):
            self.owners.append(owner)
        self.some(self.at_once)

    def some(self, max_blocks: int) -> bool:
        """Gives back about so many blocks, one sequence or more. Whether any are left."""
        seqs = self._tables.sequences
        while self.owners and max_blocks > 0:
            owner = self.owners[0]
            slots = owner.ids.items()[1]
            ends = np.cumsum(-(-seqs.num_reserved[slots] // seqs.block_size))
            count = max(1, int(np.searchsorted(ends, max_blocks, side="right")))
            self._tables.release(owner, slots[:count].tolist())
            if count >= len(slots):
                self.owners.popleft()
            max_blocks -= int(ends[min(count, len(ends)) - 1])
        return bool(self.owners)
