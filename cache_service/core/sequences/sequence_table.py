"""The sequences of one pool, as columns.

Owns what is known of each sequence, one row per slot: its state, its counters, and with block_tables.py and late_columns.py its
block table and its tokens. Other parts read the columns; only the methods here write them. Rules: committed <= tokens, and
committed <= reserved, and a table of exactly ceil(reserved / block size) entries (R2); a state follows another as
transitions.py says. Columns instead of objects, because a step over a thousand sequences must be array work. Does not know who
holds a block or why.
"""

import numpy as np

from ..values.pool_config import PoolConfig
from ..values.sequence_args import Retention
from ..values.types import Int32Array, Int64Array, ReuseHint, SequenceState
from .block_tables import BlockTables
from .late_columns import Accesses, TokenRows
from .new_entries import NewEntries
from .transitions import TRANSITIONS

_ALL = 2**31 - 1
_ACTIVE = frozenset({int(SequenceState.RUNNING), int(SequenceState.LOADING)})
_RUNNING = np.int8(SequenceState.RUNNING)  # a comparison with the member itself takes several times as long


class SequenceTable:
    """One row per slot. Rows of free slots hold leftovers; memory is touched only as far as rows are used."""

    def __init__(self, config: PoolConfig) -> None:
        slots = config.max_sequences
        self.block_size = config.block_size
        self._size = np.int32(config.block_size)  # of the columns' own type, which division is faster with
        self.max_blocks = -(-config.max_tokens_per_sequence // config.block_size)
        self.ids: Int64Array = np.zeros(slots, np.int64)
        self.owners: Int32Array = np.zeros(slots, np.int32)  # number of the session
        self.states = np.zeros(slots, np.int8)  # SequenceState
        self.keeps_table = np.zeros(slots, np.bool_)  # it is swapped, and its device blocks are not given up yet
        self.roots: Int32Array = np.zeros(slots, np.int32)  # root of its scope's prefix tree
        self.tenants: Int32Array = np.zeros(slots, np.int32)
        self.num_tokens: Int32Array = np.zeros(slots, np.int32)
        self.num_committed: Int32Array = np.zeros(slots, np.int32)
        self.num_reserved: Int32Array = np.zeros(slots, np.int32)
        # What may be committed while the step of the last reservation runs: what was reserved before it.
        self.num_reserved_before: Int32Array = np.zeros(slots, np.int32)
        self.last_reserve_step: Int64Array = np.zeros(slots, np.int64)
        self.num_prompt: Int32Array = np.zeros(slots, np.int32)
        self.parent_ids: Int64Array = np.zeros(slots, np.int64)  # the sequence it was forked from; 0 when it was created
        self.num_hit: Int32Array = np.zeros(slots, np.int32)
        self.max_tokens, self.priorities = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        self.reuse_hints = np.zeros(slots, np.int8)  # ReuseHint
        self.retain_seconds = np.zeros(slots, np.float64)  # that SOON is at least
        self.accesses = Accesses(slots)
        self.start_numbers: Int64Array = np.zeros(slots, np.int64)  # place in the order of arrivals: an earlier one is smaller
        self.num_published: Int32Array = np.zeros(slots, np.int32)  # leading blocks that the index names
        self.last_nodes: Int32Array = np.zeros(slots, np.int32)  # node of the last of them, or the root
        self.part_lens = np.zeros(slots, np.int32)  # where it parts from another one, whose blocks lack the states there
        # A block behind the committed length may be shared or indexed; the next reservation looks and copies.
        self.may_copy = np.zeros(slots, np.bool_)
        # While it waits, see inflight_prefix.py: replies to wait, since the prefix that it could hit was last found longer.
        self.num_waits, self.waited_len = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        # Retention, see spans.py: sink and window, 0 for none; leading blocks that may be shared, with no hole among them.
        self.num_sink, self.num_window = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.share_limits: Int32Array = np.full(slots, _ALL, np.int32)
        self.num_retaining = 0  # sequences with a window
        self.most_held_blocks = config.num_usable_blocks
        self.group_spans, self.has_tail = config.group_spans, config.has_tail
        self.num_groups, self.new_entries = len(config.group_spans), NewEntries(config.group_spans)
        self.has_states = self.new_entries.has_states
        state_groups = self.new_entries.state_groups
        self.tables = BlockTables(self.num_reserved, self.block_size, self.max_blocks, self.num_groups, state_groups)
        self.tokens = TokenRows(self.num_tokens, config.max_tokens_per_sequence)
        self._counters = (
            *(self.num_tokens, self.num_committed, self.num_reserved, self.num_reserved_before, self.last_reserve_step),
            *(self.num_prompt, self.parent_ids, self.num_hit, self.num_published),
            *(
                self.part_lens,
                self.num_sink,
                self.num_window,
                self.num_waits,
                self.waited_len,
                self.reuse_hints,
                self.retain_seconds,
            ),
        )
        self.num_active = 0  # running or loading
        self.num_added = 0  # sequences so far: while it stands, a slot stands for the same sequence
        self._free_slots = list(range(slots - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-num_tokens // self.block_size)

    # Sequences come and go

    def add(
        self,
        sequence_id: int,
        owner_number: int,
        root: int,
        tenant: int,
        tokens: Int32Array,
        *,
        max_tokens: int,
        priority: int,
        start_number: int,
        now: float,
    ) -> int:
        """A sequence that waits without blocks. Returns its slot; needs a free one."""
        slot = self._take_slot()
        self._enter(slot, SequenceState.WAITING)
        self.ids[slot], self.owners[slot], self.roots[slot], self.tenants[slot] = sequence_id, owner_number, root, tenant
        self.tokens.wait(slot, tokens)
        self.num_tokens[slot] = self.num_prompt[slot] = len(tokens)
        self.max_tokens[slot], self.priorities[slot] = max_tokens, priority
        self.start_numbers[slot] = start_number
        self.accesses.begin(slot, now)
        return slot

    def add_fork(self, parent: int, child_id: int, num_tokens: int, num_kept: int, now: float) -> int:
        """A running sequence on the parent's first tokens and blocks, of which num_kept tokens are committed.

        Returns its slot; needs a free one.
        """
        child, num_blocks = self._take_slot(), self.num_blocks(num_kept)
        self._enter(child, SequenceState.RUNNING)
        self.tables.copy(parent, child, num_blocks)
        self.tokens.copy(parent, child, num_tokens)
        self.num_tokens[child] = self.num_prompt[child] = num_tokens
        self.num_committed[child] = self.num_reserved[child] = num_kept
        for column in (self.owners, self.roots, self.tenants, self.max_tokens, self.priorities, self.num_hit):
            column[child] = column[parent]
        self.reuse_hints[child], self.retain_seconds[child] = self.reuse_hints[parent], self.retain_seconds[parent]
        self.start_numbers[child] = self.start_numbers[parent]
        self.accesses.begin(child, now)
        self.ids[child], self.parent_ids[child] = child_id, self.ids[parent]
        if self.num_window[parent]:
            self.retain(child, int(self.num_sink[parent]), int(self.num_window[parent]))
        self._keep_holes(child, parent, num_kept)
        if num_kept % self.block_size:
            self.may_copy[[parent, child]] = True
        return child

    def remove(self, slot: int) -> None:
        """The sequence is released; its slot is free."""
        self._enter(slot, SequenceState.FREE_SLOT)
        self.num_retaining -= int(self.num_window[slot] > 0)
        self._free_slots.append(slot)

    # Starts and swaps

    def place_start(
        self, slot: int, hits: Int32Array, hit_len: int, new_blocks: Int32Array, num_reserved: int, step_id: int, now: float
    ) -> None:
        """A waiting sequence gets its first blocks: those of its hit of so many tokens, then new ones."""
        self.tables.place(slot, 0, hits)
        self.tables.place(slot, len(hits), new_blocks)
        self.num_hit[slot], self.num_reserved[slot], self.last_reserve_step[slot] = hit_len, num_reserved, step_id
        self.accesses.count_start(slot, now)

    def set_hit(self, slot: int, hit_len: int, part_len: int = 0) -> None:
        """So many tokens of a start are there, and count as committed. part_len: where a grant is to end, see part_lens."""
        for column in (self.num_committed, self.num_reserved_before, self.num_hit):
            column[slot] = hit_len
        self.may_copy[slot] = hit_len % self.block_size > 0  # the last block of the hit is another's
        self.part_lens[slot] = part_len

    def end_load(self, slot: int, hit_len: int, step_id: int) -> None:
        """The loads of a start have ended; so much of its hit is there, and what was reserved counts from this step on."""
        self.set_hit(slot, hit_len)
        self.last_reserve_step[slot] = step_id

    def run(self, slot: int) -> None:
        """The sequence runs on its device blocks."""
        self._enter(slot, SequenceState.RUNNING)
        self.keeps_table[slot] = False

    def begin_load(self, slot: int) -> None:
        self._enter(slot, SequenceState.LOADING)

    def swap_out(self, slot: int, *, keeps_table: bool) -> None:
        """The sequence is in the host tier. keeps_table: its device blocks are its own for now."""
        self._enter(slot, SequenceState.SWAPPED)
        self.keeps_table[slot] = keeps_table

    def give_up_table(self, slot: int) -> None:
        """The device blocks of a sequence that is swapped out are not its own any more."""
        self.keeps_table[slot] = False

    # Tokens and reservations

    def append_tokens(self, slots: Int64Array, num_new: Int32Array, tokens: Int32Array, *, one_each: bool) -> None:
        """Appends num_new[i] of the concatenated tokens to each sequence. one_each: every num_new is 1."""
        known = self.num_tokens[slots]
        self.tokens.append(slots, known, num_new, tokens, one_each=one_each)
        self.num_tokens[slots] = known + num_new

    def commit(self, slots: Int64Array, lens: Int32Array) -> None:
        self.num_committed[slots] = lens

    def grant(self, slots: Int64Array, held: Int32Array, wanted: Int32Array, step_id: int) -> None:
        """A step reserves slots up to wanted [n], where held [n] were reserved before."""
        self.num_reserved_before[slots] = held
        self.num_reserved[slots] = wanted
        self.last_reserve_step[slots] = step_id

    def grant_one(self, slot: int, held: int, wanted: int, step_id: int) -> None:
        """The same for one sequence. The blocks that it may write from now on are its own."""
        if wanted > self.num_committed[slot]:
            self.may_copy[slot] = False
        self.num_reserved_before[slot] = held
        self.num_reserved[slot] = wanted
        self.last_reserve_step[slot] = step_id

    def truncate(self, slot: int, num_tokens: int, num_kept: int) -> None:
        """Up to num_tokens are known, and up to num_kept committed and reserved, from now on. Blocks behind may be shared."""
        self.num_tokens[slot] = min(int(self.num_tokens[slot]), num_tokens)
        for column in (self.num_committed, self.num_reserved, self.num_reserved_before):
            column[slot] = min(int(column[slot]), num_kept)
        self._keep_holes(slot, slot, num_kept)
        self.may_copy[slot] = True

    def _keep_holes(self, slot: int, source: int, num_tokens: int) -> None:
        """The table is now that of the first num_tokens of `source`, with their holes."""
        ends, shared = np.minimum(self.tables.hole_ends[source], self.num_blocks(num_tokens)), int(self.share_limits[source])
        if ends[0] < self.tables.hole_ends[source, 0]:  # cut before the holes of retention, which are behind its sink
            ends[0], shared = 0, self._share_limit(slot)
        for group in self.new_entries.state_groups:
            ends[group] = min(int(ends[group]), self.group_spans[group].first(num_tokens) // self.block_size)
        self.tables.hole_ends[slot], self.share_limits[slot] = ends, shared

    def cut_hit(self, slot: int, num_tokens: int) -> None:
        """Only so many tokens of a hit, whole blocks, have come; no more slots are reserved."""
        self.trim_reserved(slot, num_tokens)
        self.tables.hole_ends[slot] = np.minimum(self.tables.hole_ends[slot], num_tokens // self.block_size)

    def trim_reserved(self, slot: int, num_tokens: int) -> None:
        """At most so many slots are reserved from now on."""
        for column in (self.num_reserved, self.num_reserved_before):
            column[slot] = min(int(column[slot]), num_tokens)

    def change_owner(self, slot: int, owner_number: int, sequence_id: int, step_id: int) -> None:
        """Another session has the sequence from now on; it may commit all that is reserved. step_id: its last completed one."""
        self.ids[slot], self.owners[slot], self.parent_ids[slot] = sequence_id, owner_number, 0
        self.num_reserved_before[slot], self.last_reserve_step[slot] = self.num_reserved[slot], step_id
        self.may_copy[slot] = True  # the steps of the one before may still read its blocks

    def update(
        self,
        slot: int,
        *,
        priority: int | None = None,
        reuse_hint: ReuseHint | None = None,
        retain_seconds: float | None = None,
    ) -> None:
        """What the client wishes of it from now on."""
        if priority is not None:
            self.priorities[slot] = priority
        if reuse_hint is not None:
            self.reuse_hints[slot] = reuse_hint
        if retain_seconds is not None:
            self.retain_seconds[slot] = retain_seconds

    # The part of a table that the index knows

    def set_published(self, slots: Int64Array | int, num_published: Int32Array | int, nodes: Int32Array | int) -> None:
        """The index names so many leading blocks of each; the last of them is this node's, or the node is the root."""
        self.num_published[slots], self.last_nodes[slots] = num_published, nodes

    def unpublish(self, slots: Int64Array | int) -> None:
        """The index knows nothing of these tables."""
        self.num_published[slots] = 0
        self.last_nodes[slots] = self.roots[slots]

    def limit_sharing(self, slot: int, num_blocks: int) -> None:
        """Blocks from this table index on are never shared."""
        self.share_limits[slot] = min(int(self.share_limits[slot]), num_blocks)

    # Spans

    @property
    def may_have_holes(self) -> bool:
        """Whether anything is dropped of any sequence while it runs."""
        return self.num_retaining > 0 or self.num_groups > 1

    def retain(self, slot: int, num_sink: int, num_window: int) -> None:
        """From now on only so many leading and last tokens are kept. The caller drops the blocks outside next."""
        self.num_retaining += int(not self.num_window[slot])
        self.num_sink[slot], self.num_window[slot] = num_sink, num_window
        self.tables.hole_ends[slot, 0], self.share_limits[slot] = 0, self._share_limit(slot)

    def _share_limit(self, slot: int) -> int:
        """The leading blocks that may be shared, of a sequence with retention and no hole."""
        return min(int(self.num_sink[slot] + self.num_window[slot]) // self.block_size, _ALL)

    # Waiting for a prefix that is being computed, see inflight_prefix.py

    def note_wait(self, slot: int, found_len: int, num_waits: int) -> None:
        """It waits once more, num_waits times since the prefix that it could hit was last found longer: found_len tokens."""
        self.waited_len[slot] = max(found_len, int(self.waited_len[slot]))
        self.num_waits[slot] = num_waits

    # Rows, read

    def retention(self, slot: int) -> Retention | None:
        if not self.num_window[slot]:
            return None
        return Retention(int(self.num_sink[slot]), int(self.num_window[slot]))

    def live_slots(self) -> Int64Array:
        return np.flatnonzero(self.states)

    def running_slots(self) -> Int64Array:
        return (self.states == _RUNNING).nonzero()[0]

    def _enter(self, slot: int, state: SequenceState) -> None:
        """The one place that writes a state."""
        before = int(self.states[slot])
        assert (before, state) in TRANSITIONS, f"a sequence goes from {SequenceState(before).name} to {state.name}"
        self.states[slot] = state
        if before == SequenceState.WAITING:
            self.tokens.end_wait(slot, is_kept=state is not SequenceState.FREE_SLOT)
        self.num_active += (state in _ACTIVE) - (before in _ACTIVE)

    def _take_slot(self) -> int:
        """A slot whose counters are all 0."""
        self.accesses.settle()
        self.tokens.settle()
        self.num_added += 1
        slot = self._free_slots.pop()
        for column in self._counters:
            column[slot] = 0
        self.may_copy[slot] = False
        self.share_limits[slot] = _ALL
        self.tables.hole_ends[slot] = 0
        return slot
