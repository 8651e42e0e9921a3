"""The sequences of one pool, as columns.

Owns what is known of each sequence: its state, its three counters, its tokens and its block table, one row per slot. Other
parts read the columns; only the methods here write them. Rules: committed <= tokens, committed <= reserved, and a table of
exactly ceil(reserved / block size) entries (R2); a state follows another as transitions.py says. Columns instead of objects,
because a step over a thousand sequences must be array work. Does not know who holds a block or why.
"""

import numpy as np
import numpy.typing as npt

from kvkeeper.common.service.rows import untouched

from ..values.pool_config import PoolConfig
from ..values.sequence_args import Retention
from ..values.types import NULL_BLOCK, Int32Array, Int64Array, ReuseHint, SequenceState
from .new_entries import NewEntries
from .transitions import TRANSITIONS

_ALL = 2**31 - 1
_ACTIVE = frozenset({int(SequenceState.RUNNING), int(SequenceState.LOADING)})
_MOST_NOTED = 256  # steps whose accesses may wait to be counted


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
        self.roots: Int32Array = np.zeros(slots, np.int32)  # root of the tenant's prefix tree
        self.num_tokens: Int32Array = np.zeros(slots, np.int32)
        self.num_committed: Int32Array = np.zeros(slots, np.int32)
        self.num_reserved: Int32Array = np.zeros(slots, np.int32)
        # What may be committed while the step of the last reservation runs: what was reserved before it.
        self.num_reserved_before: Int32Array = np.zeros(slots, np.int32)
        self.last_reserve_step: Int64Array = np.zeros(slots, np.int64)
        self.num_prompt: Int32Array = np.zeros(slots, np.int32)
        self.parent_ids: Int64Array = np.zeros(slots, np.int64)  # the sequence it was forked from; 0 when it was created
        self.num_hit: Int32Array = np.zeros(slots, np.int32)
        self.max_tokens: Int32Array = np.zeros(slots, np.int32)
        self.priorities: Int32Array = np.zeros(slots, np.int32)
        self.reuse_hints = np.zeros(slots, np.int8)  # ReuseHint
        self._num_accesses: Int64Array = np.zeros(slots, np.int64)
        # What steps leave for later: accesses not counted (slots, when), tokens (slots, positions, tokens) not written yet.
        self._accessed: list[tuple[Int64Array, float]] = []
        self._told: list[tuple[Int64Array, Int32Array, Int32Array]] = []
        self.start_numbers: Int64Array = np.zeros(slots, np.int64)  # place in the order of arrivals: an earlier one is smaller
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
        # Groups of layers, see group_windows.py: each has a table of its own, max_blocks entries behind that of the one before,
        # so that one number, group * max_blocks + table index, is the place of an entry. Leading entries may be holes. Of a
        # group of states any may be; before group_hole_ends all are that are no checkpoints.
        self.group_spans, self.has_tail = config.group_spans, config.has_tail
        self.num_groups, self.new_entries = len(config.group_spans), NewEntries(config.group_spans)
        self.has_states = self.new_entries.has_states
        self.group_hole_ends: Int32Array = np.zeros((slots, self.num_groups), np.int32)
        self.tables: Int32Array = untouched(slots, self.num_groups * self.max_blocks)
        self._tokens: Int32Array = untouched(slots, config.max_tokens_per_sequence)
        self._prompts: dict[int, Int32Array] = {}  # of what waits, by slot: it takes a row, pages of memory, once it starts
        self._counters = (
            *(self.num_tokens, self.num_committed, self.num_reserved, self.num_reserved_before, self.last_reserve_step),
            *(self.num_prompt, self.parent_ids, self.num_hit, self._num_accesses, self.num_published),
            *(self.num_sink, self.num_window, self.hole_ends, self.num_waits, self.waited_len, self.reuse_hints),
        )
        self.num_active = 0  # running or loading
        self.num_added = 0  # sequences so far: while it stands, a slot stands for the same sequence
        self._free_slots = list(range(slots - 1, -1, -1))

    @property
    def num_accesses(self) -> Int64Array:
        """[slots] how many steps named each sequence."""
        self.settle()
        return self._num_accesses

    @property
    def tokens(self) -> Int32Array:
        """[slots, most tokens] token ids; a row holds num_tokens of them, but for a sequence that waits."""
        if self._told:
            self.settle()
        return self._tokens

    @property
    def slots_with_prompt(self) -> frozenset[int]:
        """Of which a prompt is kept: those of the sequences that wait."""
        return frozenset(self._prompts)

    def known_tokens(self, slot: int) -> Int32Array:
        """[num_tokens] token ids of a sequence in any state; a view."""
        prompt = self._prompts.get(slot)  # no step appends to it
        return self.tokens[slot, : self.num_tokens[slot]] if prompt is None else prompt

    def tokens_of(self, slots: Int64Array | int) -> Int32Array:
        """[slots, most tokens] token ids, of which the rows of these sequences, none of which waits, are up to date.

        For a look at a few rows on the path of a step, which need not wait for a thousand others.
        """
        if self._told:
            wanted = np.zeros(len(self.ids), np.bool_)
            wanted[slots] = True
            for told, positions, tokens in self._told:
                at = wanted[told].nonzero()[0]
                if len(at):
                    self._tokens[told[at], positions[at]] = tokens[at]
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

    def _note_tokens(self, slots: Int64Array, positions: Int32Array, tokens: Int32Array) -> None:
        """Each of these distinct sequences gets one token at its position.

        Written at the next look: a thousand rows are a thousand cache misses, and the engine need not wait for them.
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
    def has_active(self) -> bool:
        """Whether any sequence holds blocks, or is about to."""
        return self.num_active > 0

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-num_tokens // self.block_size)

    def num_blocks_of(self, num_tokens: Int32Array) -> Int32Array:
        """[n] blocks that so many tokens [n] need."""
        return -(-num_tokens // self._size)

    # Sequences come and go

    def add(
        self,
        sequence_id: int,
        owner_number: int,
        root: int,
        tokens: Int32Array,
        *,
        max_tokens: int,
        priority: int,
        start_number: int,
        now: float,
    ) -> int:
        """A sequence that waits without blocks. Answers its slot; needs a free one."""
        slot = self._take_slot()
        self._enter(slot, SequenceState.WAITING)
        self.ids[slot], self.owners[slot], self.roots[slot] = sequence_id, owner_number, root
        self._prompts[slot] = np.array(tokens, np.int32)
        self.num_tokens[slot] = self.num_prompt[slot] = len(tokens)
        self.max_tokens[slot], self.priorities[slot] = max_tokens, priority
        self.start_numbers[slot], self._last_access[slot] = start_number, now
        return slot

    def add_fork(self, parent: int, child_id: int, num_tokens: int, num_kept: int, now: float) -> int:
        """A running sequence on the parent's first tokens and blocks, of which num_kept tokens are committed.

        Answers its slot; needs a free one.
        """
        child, num_blocks = self._take_slot(), self.num_blocks(num_kept)
        self._enter(child, SequenceState.RUNNING)
        self.tables[child, :num_blocks] = self.tables[parent, :num_blocks]
        self._tokens[child, :num_tokens] = self._tokens[parent, :num_tokens]
        for group in range(1, self.num_groups):
            first = group * self.max_blocks
            self.tables[child, first : first + num_blocks] = self.tables[parent, first : first + num_blocks]
        self.group_hole_ends[child] = self._hole_ends_of(parent, num_kept)
        self.num_tokens[child] = self.num_prompt[child] = num_tokens
        self.num_committed[child] = self.num_reserved[child] = num_kept
        for column in (self.owners, self.roots, self.max_tokens, self.priorities, self.num_hit):
            column[child] = column[parent]
        self.reuse_hints[child] = self.reuse_hints[parent]
        self.start_numbers[child], self._last_access[child] = self.start_numbers[parent], now
        self.ids[child], self.parent_ids[child] = child_id, self.ids[parent]
        if self.num_window[parent]:
            self.retain(child, int(self.num_sink[parent]), int(self.num_window[parent]))
            if self.hole_ends[parent] <= num_blocks:  # else it is cut before the holes
                self.hole_ends[child], self.share_limits[child] = self.hole_ends[parent], self.share_limits[parent]
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
        self, slot: int, hits: Int32Array, new_blocks: Int32Array, num_reserved: int, step_id: int, now: float
    ) -> None:
        """A waiting sequence gets its first blocks: those of its hit, then new ones."""
        hit_len = len(hits) * self.block_size
        self.tables[slot, : len(hits)] = hits
        self.tables[slot, len(hits) : len(hits) + len(new_blocks)] = new_blocks
        self.num_hit[slot], self.num_reserved[slot], self.last_reserve_step[slot] = hit_len, num_reserved, step_id
        self._num_accesses[slot] += 1  # at once: no step named it while it waited
        self._last_access[slot] = now

    def place_groups(self, slot: int, start: int, blocks: Int32Array, first_holes: int = 0) -> None:
        """Entries of the groups behind the first [groups - 1, n], from table index `start` on; 0 is a hole.

        first_holes: of the first entries placed, those that may be holes.
        """
        for group, row in enumerate(blocks, 1):
            first = group * self.max_blocks + start
            self.tables[slot, first : first + len(row)] = row
            if first_holes:
                there = row[:first_holes].nonzero()[0]
                self.group_hole_ends[slot, group] = start + (int(there[0]) if len(there) else first_holes)

    def place_whole(self, slot: int, blocks: Int32Array) -> None:
        """The tables of all groups [groups * entries], one behind the other."""
        for group, row in enumerate(blocks.reshape(self.num_groups, -1)):
            first = group * self.max_blocks
            self.tables[slot, first : first + len(row)] = row

    def set_hit(self, slot: int, hit_len: int) -> None:
        """So many tokens of a start are there, and count as committed."""
        for column in (self.num_committed, self.num_reserved_before, self.num_hit):
            column[slot] = hit_len

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

    def swap_out(self, slot: int) -> None:
        """The sequence is swapped out, and keeps its device blocks for now."""
        self._enter(slot, SequenceState.SWAPPED)
        self.keeps_table[slot] = True

    def give_up_table(self, slot: int) -> None:
        """The device blocks of a sequence that is swapped out are not its own any more."""
        self.keeps_table[slot] = False

    def fail_load(self, slot: int) -> None:
        """The sequence stays in the host tier: a block of its swap-in could not be loaded."""
        self._enter(slot, SequenceState.SWAPPED)

    # Tokens and reservations

    def append_tokens(self, slots: Int64Array, num_new: Int32Array, tokens: Int32Array, *, one_each: bool) -> None:
        """Appends num_new[i] of the concatenated tokens to each sequence. one_each: every num_new is 1."""
        known = self.num_tokens[slots]
        if one_each:
            self._note_tokens(slots, known, tokens)
        else:
            within = np.arange(len(tokens)) - np.repeat(np.cumsum(num_new) - num_new, num_new)
            self.tokens[np.repeat(slots, num_new), np.repeat(known, num_new) + within] = tokens
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
        if self.has_tail or self.has_states:
            self.group_hole_ends[slot] = self._hole_ends_of(slot, num_kept)
        self.may_copy[slot] = True

    def _hole_ends_of(self, slot: int, num_tokens: int) -> Int32Array:
        """[groups] what group_hole_ends are of the first num_tokens of a sequence."""
        ends = np.minimum(self.group_hole_ends[slot], self.num_blocks(num_tokens))
        for group in self.new_entries.state_groups:
            ends[group] = min(int(ends[group]), self.group_spans[group].first(num_tokens) // self.block_size)
        return ends

    def cut_hit(self, slot: int, num_tokens: int) -> None:
        """Of a hit only so many tokens, whole blocks, have come, and no more slots are reserved."""
        self.trim_reserved(slot, num_tokens)
        if self.num_groups > 1:
            self.group_hole_ends[slot] = np.minimum(self.group_hole_ends[slot], num_tokens // self.block_size)

    def trim_reserved(self, slot: int, num_tokens: int) -> None:
        """At most so many slots are reserved from now on."""
        for column in (self.num_reserved, self.num_reserved_before):
            column[slot] = min(int(column[slot]), num_tokens)

    def change_owner(self, slot: int, owner_number: int, sequence_id: int, step_id: int) -> None:
        """Another session has the sequence from now on; it may commit all that is reserved. step_id: its last completed one."""
        self.ids[slot], self.owners[slot], self.parent_ids[slot] = sequence_id, owner_number, 0
        self.num_reserved_before[slot], self.last_reserve_step[slot] = self.num_reserved[slot], step_id
        self.may_copy[slot] = True  # the steps of the one before may still read its blocks

    def set_priority(self, slot: int, priority: int) -> None:
        self.priorities[slot] = priority

    def set_reuse_hint(self, slot: int, hint: ReuseHint) -> None:
        self.reuse_hints[slot] = hint

    # Block tables

    def set_blocks(self, slots: Int64Array | int, table_idx: Int64Array | Int32Array, blocks: Int32Array) -> None:
        """One entry each: the block at table_idx[i] of slots[i], or of one slot, is blocks[i]."""
        self.tables[slots, table_idx] = blocks

    def set_run(self, slot: int, start: int, blocks: Int32Array) -> None:
        """Consecutive entries of one table, from `start` on."""
        self.tables[slot, start : start + len(blocks)] = blocks

    # The part of a table that the index knows

    def note_published(self, slots: Int64Array, num_published: Int32Array) -> None:
        """The index is about to name so many leading blocks [n] of each."""
        self.num_published[slots] = num_published

    def note_last_nodes(self, slots: Int64Array | int, nodes: Int32Array) -> None:
        self.last_nodes[slots] = nodes

    def set_published(self, slot: int, num_published: int, node: int) -> None:
        """The index names so many leading blocks; the last of them is this node's, or the node is the root."""
        self.num_published[slot], self.last_nodes[slot] = num_published, node

    def unpublish(self, slots: Int64Array | int) -> None:
        """The index knows nothing of these tables."""
        self.num_published[slots] = 0
        self.last_nodes[slots] = self.roots[slots]

    def limit_sharing(self, slot: int, num_blocks: int) -> None:
        """Blocks from this table index on are never shared."""
        self.share_limits[slot] = min(int(self.share_limits[slot]), num_blocks)

    # Retention

    def retain(self, slot: int, num_sink: int, num_window: int) -> None:
        """From now on only so many leading and last tokens are kept. The caller drops the blocks outside next."""
        self.num_retaining += int(not self.num_window[slot])
        self.num_sink[slot], self.num_window[slot] = num_sink, num_window
        self.close_hole(slot)

    def open_hole(self, slot: int, table_idx: Int64Array, end: int) -> None:
        """These entries are holes; the last hole ends before `end`."""
        self.tables[slot, table_idx] = NULL_BLOCK
        self.hole_ends[slot] = end

    def close_hole(self, slot: int) -> None:
        """No table entry is a hole any more."""
        self.hole_ends[slot] = 0
        if self.num_window[slot]:
            limit = int(self.num_sink[slot] + self.num_window[slot]) // self.block_size
            self.share_limits[slot] = min(limit, _ALL)

    # Windows of groups

    def open_group_hole(self, slot: int, group: int, places: Int64Array, end: int) -> None:
        """These places of the group's table are holes; the last hole ends before table index `end`."""
        self.tables[slot, places] = NULL_BLOCK
        self.group_hole_ends[slot, group] = end

    # Waiting for a prefix that is being computed, see inflight_prefix.py

    def restart_waits(self, slot: int, found_len: int) -> None:
        """The prefix that it could hit is longer than when it began to wait."""
        self.waited_len[slot], self.num_waits[slot] = found_len, 0

    def count_wait(self, slot: int) -> None:
        self.num_waits[slot] += 1

    # Rows, read

    def table(self, slot: int) -> Int32Array:
        """[ceil(reserved / block size)] block ids, NULL_BLOCK for a hole of retention; a view."""
        return self.tables[slot, : self.num_blocks(int(self.num_reserved[slot]))]

    def group_table(self, slot: int, group: int) -> Int32Array:
        """The same of one group; NULL_BLOCK for what its window has left behind."""
        first = group * self.max_blocks
        return self.tables[slot, first : first + self.num_blocks(int(self.num_reserved[slot]))]

    def whole_table(self, slot: int) -> Int32Array:
        """[groups * entries] the tables of all groups, one behind the other; of one group a view."""
        return self.table(slot) if self.num_groups == 1 else np.concatenate([self.table(slot), *self.shown_group_tables(slot)])

    def leaves_first(self, slot: int) -> Int32Array:
        """The blocks that the tables name, those that are to be forgotten first at the front: the deepest.

        The first group goes first: with its blocks, those of the others are forgotten.
        """
        if self.num_groups == 1:
            return self.held(slot)[::-1]
        blocks = np.concatenate([self.group_table(slot, group)[::-1] for group in range(self.num_groups)])
        return blocks[blocks != NULL_BLOCK]

    def num_group_holes(self, slots: Int64Array) -> Int64Array:
        """[groups] entries without a block in the tables of these sequences. Looks at each entry of a group of states."""
        num_holes = self.group_hole_ends[slots].sum(axis=0, dtype=np.int64)
        for group in self.new_entries.state_groups:
            tables = [self.group_table(slot, group) for slot in slots.tolist()]
            num_holes[group] = sum(len(table) - int(np.count_nonzero(table)) for table in tables)
        return num_holes

    def shown_group_tables(self, slot: int) -> tuple[Int32Array, ...]:
        """Those of the groups behind the first, as the session sees them; () where there is one group."""
        return tuple(self.group_table(slot, group) for group in range(1, self.num_groups))

    def shown_table(self, slot: int) -> Int32Array:
        """The table as its session sees it: a swapped sequence has none."""
        table = self.table(slot)
        return table[:0] if self.states[slot] == SequenceState.SWAPPED else table

    def held(self, slot: int) -> Int32Array:
        """The blocks that a table names, in order, without its holes; behind them those of the other groups."""
        table = self.table(slot)
        if self.num_groups > 1:
            table = np.concatenate([table, *self.shown_group_tables(slot)])
            return table[table != NULL_BLOCK]
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

    def _enter(self, slot: int, state: SequenceState) -> None:
        """The one place that writes a state."""
        before = int(self.states[slot])
        assert (before, state) in TRANSITIONS, f"a sequence goes from {SequenceState(before).name} to {state.name}"
        self.states[slot] = state
        if before == SequenceState.WAITING:
            prompt = self._prompts.pop(slot)
            if state is not SequenceState.FREE_SLOT:
                self._tokens[slot, : len(prompt)] = prompt
        self.num_active += (state in _ACTIVE) - (before in _ACTIVE)

    def _take_slot(self) -> int:
        """A slot whose counters are all 0."""
        self.settle()
        self.num_added += 1
        slot = self._free_slots.pop()
        for column in self._counters:
            column[slot] = 0
        self.may_copy[slot] = False
        self.share_limits[slot] = _ALL
        self.group_hole_ends[slot] = 0
        return slot
