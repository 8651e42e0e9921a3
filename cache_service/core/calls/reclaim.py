"""Giving back what sessions that ended still hold, in slices.

Owns nothing but the size of the first slice; the ended sessions stand in PoolState. A session of a million blocks would keep
all others waiting if it were given back in one go. Rules: no call reaches such a sequence any more; its blocks count as
referenced until their turn comes, so every audit holds between two slices; a block that the session may still write is in
quarantine before it is given back; of a sequence longer than a slice the end goes first, but one with retention goes whole.
"""

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..tables.lifecycle import SequenceLifecycle
from ..tiers.sequence_swap import SequenceSwapper
from ..values.types import NO_INT32, NULL_BLOCK, Int32Array, SequenceState

AT_ONCE = 4096  # blocks, a millisecond or two
_SEQUENCE_COST = 16  # a sequence takes as long as so many blocks


class Reclaim:
    """Works off the ended sessions of one pool."""

    def __init__(self, state: PoolState, lifecycle: SequenceLifecycle, swapper: SequenceSwapper | None) -> None:
        self.at_once = AT_ONCE  # blocks given back with the end of a session; fewer never wait
        self._state = state
        self._ended = state.ended_sessions
        self._sequences = state.sequences
        self._publisher = state.publisher
        self._lifecycle = lifecycle
        self._swapper = swapper

    @property
    def is_left(self) -> bool:
        """Whether an ended session still holds blocks or sequences."""
        return bool(self._ended)

    def add_ended(self, owner: SessionState) -> None:
        """The session has ended. About `at_once` blocks are given back now, and every sequence with blocks on their way."""
        slots = owner.ids.items()[1]
        self._publisher.forget_slots(slots.tolist())
        states = self._sequences.states[slots]
        self._release(owner, slots[(states != SequenceState.RUNNING) & (states != SequenceState.WAITING)].tolist())
        if len(owner.ids):
            self._ended.append(owner)
        self.release_blocks(self.at_once)

    def release_blocks(self, max_blocks: int) -> bool:
        """Gives back about so many blocks, at least a part of a sequence. Whether any are left."""
        while self._ended and max_blocks > 0:
            owner = self._ended[0]
            max_blocks -= self._release_some(owner, max_blocks)
            if not len(owner.ids):
                self._ended.popleft()
        return bool(self._ended)

    def release_slot(self) -> None:
        """Gives back a whole sequence, for one that wants its slot. Needs an ended session."""
        num_free = self._sequences.num_free_slots
        while self._sequences.num_free_slots == num_free:
            self.release_blocks(AT_ONCE)

    def _release_some(self, owner: SessionState, max_blocks: int) -> int:
        """Gives back the session's first sequences, or the end of one that is longer. Returns how many blocks' work it was."""
        seqs = self._sequences
        slots = owner.ids.first_slots(max_blocks // _SEQUENCE_COST + 1)
        counts = -(-seqs.num_reserved[slots] // seqs.block_size)
        if counts[0] > max_blocks and not seqs.num_window[slots[0]] and seqs.num_groups == 1:  # holes would come into windows
            self._release_end(owner, int(slots[0]), int(counts[0]) - max_blocks)
            return max_blocks
        costs = np.cumsum(counts + _SEQUENCE_COST)
        count = max(1, int(np.searchsorted(costs, max_blocks, side="right")))
        self._release(owner, slots[:count].tolist())
        return int(costs[count - 1])

    def _release(self, owner: SessionState, slots: list[int]) -> None:
        self._quarantine(owner, [self._writable_blocks(slot) for slot in slots] if owner.may_still_write else [])
        self._lifecycle.release(owner, slots)

    def _release_end(self, owner: SessionState, slot: int, num_kept: int) -> None:
        """Gives back the blocks of a running sequence behind the first num_kept."""
        table = self._sequences.tables.get(slot)
        if owner.may_still_write:
            num_dropped = len(table) - num_kept
            self._quarantine(owner, [self._writable_blocks(slot)[-num_dropped:]])
        self._lifecycle.release_end(owner, slot, num_kept)

    def _quarantine(self, owner: SessionState, tables: list[Int32Array]) -> None:
        blocks = np.concatenate([NO_INT32, *tables])
        blocks = blocks[~self._state.pool.indexed[blocks]]  # no step writes an indexed block (R5)
        if len(blocks):
            quarantines = self._state.quarantines
            self._state.pool.quarantine(blocks, fences=NO_INT32)
            quarantines[owner.session] = np.concatenate([quarantines[owner.session], blocks])

    def _writable_blocks(self, slot: int) -> Int32Array:
        """Blocks that a step of the session may still write: those behind the committed length, or behind the hit to come.

        What is being loaded is the transfers' to keep.
        """
        seqs, first = self._sequences, int(self._sequences.num_committed[slot])
        if seqs.states[slot] == SequenceState.LOADING:
            assert self._swapper is not None, "a load without a host tier"
            hit_len = self._swapper.moves[slot].hit_len
            if hit_len is None:
                return NO_INT32
            first = hit_len
        elif seqs.states[slot] != SequenceState.RUNNING and not seqs.keeps_table[slot]:
            return NO_INT32
        blocks = seqs.tables.get_from(slot, first // seqs.block_size)
        return blocks[blocks != NULL_BLOCK] if seqs.num_groups > 1 else blocks.copy()
