"""The sequences of one pool, as columns.

Owns what is known of each sequence: its three counters, its tokens and its block table, one row per slot. Rules: committed
<= tokens, committed <= reserved, and a table of exactly ceil(reserved / block size) entries (R2). Columns instead of
objects, because a step over a thousand sequences must be array work. Does not know who holds a block or why.
"""

import numpy as np
import numpy.typing as npt

from kvkeeper.service.rows import untouched

from ..values.errors import InvalidField, UnknownSequence
from ..values.pool_config import PoolConfig
from ..values.sequence_args import Retention
from ..values.types import NULL_BLOCK, Int32Array, Int64Array, SequenceState

_ALL = 2**31 - 1
_MOST_NOTED = 256  # steps whose accesses may wait to be counted


class SequenceTable:
    """Columns over slots. Rows of free slots hold leftovers; memory is touched only as far as rows are used."""

    def __init__(self, config: PoolConfig) -> None:
        slots = config.max_sequences
        self.block_size = config.block_size
        self.max_blocks = -(-config.max_tokens_per_sequence // config.block_size)
        self.ids: Int64Array = np.zeros(slots, np.int64)
        self.owners: Int32Array = np.zeros(slots, np.int32)  # number of the session
        self.states = np.zeros(slots, np.int8)  # SequenceState
        self.keeps_table = np.zeros(slots, np.bool_)  # it is swapped, and its device blocks are not given up yet
        self.roots: Int32Array = np.zeros(slots, np.int32)  # root of the tenant's prefix tree
        self.num_tokens: Int32Array = np.zeros(slots, np.int32)
        self.num_committed: Int32Array = np.zeros(slots, np.int32)
        self.num_reserved: Int32Array = np.zeros(slots, np.int32)
        # What may be committed while the step of the last reservation runs: what was reserved before it.
        self.num_reserved_before: Int32Array = np.zeros(slots, np.int32)
        self.last_reserve_step: Int64Array = np.zeros(slots, np.int64)
        self.num_prompt: Int32Array = np.zeros(slots, np.int32)
        self.parent_ids: Int64Array = np.zeros(slots, np.int64)  # whom it was forked from; 0 when it was created
        self.num_hit: Int32Array = np.zeros(slots, np.int32)
        self.max_tokens: Int32Array = np.zeros(slots, np.int32)
        self.priorities: Int32Array = np.zeros(slots, np.int32)
        self._num_accesses: Int64Array = np.zeros(slots, np.int64)
        # What steps leave for later: accesses not counted (slots, when), tokens (slots, positions, tokens) not written yet.
        self._accessed: list[tuple[Int64Array, float]] = []
        self._told: list[tuple[Int64Array, Int32Array, Int32Array]] = []
        self.start_numbers: Int64Array = np.zeros(slots, np.int64)  # place in the order of arrivals; elder is smaller
        self._last_access = np.zeros(slots, np.float64)
        self.num_published: Int32Array = np.zeros(slots, np.int32)  # leading blocks that the index names
        self.last_nodes: Int32Array = np.zeros(slots, np.int32)  # node of the last of them, or the root
        # A block behind the committed length may be shared or indexed; the next reservation looks and copies.
        self.may_copy = np.zeros(slots, np.bool_)
        # While it waits, see inflight_prefix.py: answers to wait, since the prefix that it could hit was last found longer.
        self.num_waits: Int32Array = np.zeros(slots, np.int32)
        self.waited_len: Int32Array = np.zeros(slots, np.int32)
        # Retention, see retention.py: sink and window, 0 for none; table index behind the last hole; leading blocks that may be
        # shared, because attention was whole up to there and no hole is among them.
        self.num_sink: Int64Array = np.zeros(slots, np.int64)
        self.num_window: Int64Array = np.zeros(slots, np.int64)
        self.hole_ends: Int32Array = np.zeros(slots, np.int32)
        self.share_limits: Int32Array = np.full(slots, _ALL, np.int32)
        self.num_retaining = 0  # sequences with a window
        self.most_held_blocks = config.num_usable_blocks
        self.tables: Int32Array = untouched(slots, self.max_blocks)
        self._tokens: Int32Array = untouched(slots, config.max_tokens_per_sequence)
        self._counters = (
            *(self.num_tokens, self.num_committed, self.num_reserved, self.num_reserved_before, self.last_reserve_step),
            *(self.num_prompt, self.parent_ids, self.num_hit, self._num_accesses, self.num_published),
            *(self.num_sink, self.num_window, self.hole_ends, self.num_waits, self.waited_len),
        )
        self._free_slots = list(range(slots - 1, -1, -1))

    @property
    def num_accesses(self) -> Int64Array:
        """[slots] how many steps named each sequence."""
        self.settle()
        return self._num_accesses

    @property
    def tokens(self) -> Int32Array:
        """[slots, most tokens] token ids; a row holds num_tokens of them."""
        if self._told:
            self.settle()
        return self._tokens

    @property
    def last_access(self) -> npt.NDArray[np.float64]:
        """[slots] when a step or a read last named each sequence, or made it."""
        self.settle()
        return self._last_access

    def note_access(self, slots: Int64Array, now: float) -> None:
        """A step names these distinct sequences."""
        self._accessed.append((slots, now))
        if len(self._accessed) == _MOST_NOTED:
            self.settle()

    def note_tokens(self, slots: Int64Array, positions: Int32Array, tokens: Int32Array) -> None:
        """Each of these distinct sequences gets one token at its position.

        Written when somebody looks: a thousand rows are a thousand cache misses, and the engine need not wait for them.
        """
        self._told.append((slots, positions, tokens))
        if len(self._told) == _MOST_NOTED:
            self.settle()

    def settle(self) -> None:
        """Does what steps have left for later."""
        for slots, now in self._accessed:
            self._num_accesses[slots] += 1
            self._last_access[slots] = now
        self._accessed.clear()
        for slots, positions, tokens in self._told:
            self._tokens[slots, positions] = tokens
        self._told.clear()

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def some_run(self) -> bool:
        """Whether any sequence holds blocks, or is about to."""
        return bool(((self.states == SequenceState.RUNNING) | (self.states == SequenceState.LOADING)).any())

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-num_tokens // self.block_size)

    def take_slot(self) -> int:
        """A slot whose counters are all 0."""
        self.settle()
        slot = self._free_slots.pop()
        for column in self._counters:
            column[slot] = 0
        self.may_copy[slot] = False
        self.share_limits[slot] = _ALL
        return slot

    def touch(self, slot: int, now: float) -> None:
        """A call or a read has named the sequence."""
        self.num_accesses[slot] += 1
        self.last_access[slot] = now

    def free_slot(self, slot: int) -> None:
        self.states[slot] = SequenceState.FREE_SLOT
        self.num_retaining -= int(self.num_window[slot] > 0)
        self._free_slots.append(slot)

    def retain(self, slot: int, num_sink: int, num_window: int) -> None:
        """From now on only so many leading and last tokens are kept. Whoever narrows it drops what is outside next."""
        self.num_retaining += int(not self.num_window[slot])
        self.num_sink[slot], self.num_window[slot] = num_sink, num_window
        self.close_hole(slot)

    def close_hole(self, slot: int) -> None:
        """No table entry is a hole any more."""
        self.hole_ends[slot] = 0
        if self.num_window[slot]:
            limit = int(self.num_sink[slot] + self.num_window[slot]) // self.block_size
            self.share_limits[slot] = min(limit, _ALL)

    def table(self, slot: int) -> Int32Array:
        """[ceil(reserved / block size)] block ids, NULL_BLOCK for a hole of retention; a view."""
        return self.tables[slot, : self.num_blocks(int(self.num_reserved[slot]))]

    def held(self, slot: int) -> Int32Array:
        """The blocks that a table names, in order, without its holes."""
        table = self.table(slot)
        return table[table != NULL_BLOCK] if self.hole_ends[slot] else table

    def retention(self, slot: int) -> Retention | None:
        if not self.num_window[slot]:
            return None
        return Retention(int(self.num_sink[slot]), int(self.num_window[slot]))

    def live_slots(self) -> Int64Array:
        return np.flatnonzero(self.states)

    def running_slots(self) -> Int64Array:
        return np.flatnonzero(self.states == SequenceState.RUNNING)

    def holding_slots(self) -> Int64Array:
        """Sequences whose tables hold device blocks."""
        states = self.states
        return np.flatnonzero((states == SequenceState.RUNNING) | (states == SequenceState.LOADING) | self.keeps_table)


class IdMap:
    """Sequence ids of one session to slots, looked up by the column.

    A sorted array and a binary search: 1,024 look-ups cost 25 us where a dictionary costs 70, and a new id, usually the
    largest, is appended.
    """

    def __init__(self) -> None:
        self._ids: Int64Array = np.zeros(16, np.int64)
        self._slots: Int64Array = np.zeros(16, np.int64)
        self._size = 0
        self._last_key = b""
        self._last_slots: Int64Array = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self._size

    def find(self, ids: Int64Array, field: str) -> Int64Array:
        """[n] slots of [n] distinct ids. Raises UnknownSequence with the first that is not there, or InvalidField.

        Steps name the same sequences again and again, so the last answer is kept until the map changes.
        """
        key = ids.tobytes()
        if key == self._last_key:
            return self._last_slots
        at = np.searchsorted(self._ids[: self._size], ids)
        there = self._ids.take(at, mode="clip") == ids
        there &= at < self._size
        if not there.all():
            unknown = int(ids[int(np.argmin(there))])
            raise UnknownSequence(f"no sequence {unknown} in this session", sequence_id=unknown)
        if len(ids) > 1 and int(np.bincount(at).max()) > 1:
            raise InvalidField(f"{field} names a sequence twice", field=field)
        self._last_key, self._last_slots = key, self._slots[at]
        return self._last_slots

    def get(self, sequence_id: int) -> int | None:
        at = int(np.searchsorted(self._ids[: self._size], sequence_id))
        return int(self._slots[at]) if at < self._size and self._ids[at] == sequence_id else None

    def add(self, sequence_id: int, slot: int) -> None:
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._slots = np.concatenate([self._slots, np.zeros_like(self._slots)])
        at = int(np.searchsorted(self._ids[: self._size], sequence_id))
        self._ids[at + 1 : self._size + 1] = self._ids[at : self._size]
        self._slots[at + 1 : self._size + 1] = self._slots[at : self._size]
        self._ids[at], self._slots[at] = sequence_id, slot
        self._size += 1
        self._forget_last()

    def remove(self, sequence_id: int) -> None:
        at = int(np.searchsorted(self._ids[: self._size], sequence_id))
        self._ids[at : self._size - 1] = self._ids[at + 1 : self._size]
        self._slots[at : self._size - 1] = self._slots[at + 1 : self._size]
        self._size -= 1
        self._forget_last()

    def items(self) -> tuple[Int64Array, Int64Array]:
        """([n] ids ascending, [n] slots)."""
        return self._ids[: self._size].copy(), self._slots[: self._size].copy()

    def _forget_last(self) -> None:
        self._last_key, self._last_slots = b"", np.zeros(0, np.int64)
