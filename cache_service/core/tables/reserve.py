"""Reservations: slots, and with them blocks, for what running sequences write next.

Owns granting, and the decision on copy-on-write (copies_due): a block that another holder has is copied before it is written
(R5). Rules: all or nothing per item (R7); blocks reserved for the oldest claim go to no later arrival. Which new entries have a
block is new_entries.py's to say. Takes valid items and cannot fail.
"""

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..values.types import NO_INT32, Int32Array, Int64Array
from .step_log import Grants, StepLog


class Reservations:
    """Grants blocks to the running sequences of one pool."""

    def __init__(self, state: PoolState) -> None:
        size = state.config.block_size
        self._block_size = size
        self._divisor, self._round_up = np.int32(size), np.int32(size - 1)
        self._clock = state.clock
        self._sequences = state.sequences
        self._pool = state.pool
        self._allocator = state.allocator
        self._claims = state.claims
        self._pin_preemption = state.pin_preemption
        self._counters = state.counters

    def reserve(self, owner: SessionState, log: StepLog, slots: Int64Array, least: Int32Array, most: Int32Array) -> Grants:
        """Grants each sequence slots up to most[i], in order; the protocol says which items are refused."""
        seqs, pool, claims = self._sequences, self._pool, self._claims
        held = seqs.num_reserved[slots]
        wanted = np.maximum(held, self._until_part(slots, held, least, most) if seqs.has_states else most)
        table_lens = (held + self._round_up) // self._divisor
        num_new = (wanted + self._round_up) // self._divisor - table_lens
        growing = num_new.nonzero()[0]
        num_groups = seqs.num_groups
        num_entries = int(num_new.sum()) if len(growing) else 0
        total = num_entries * num_groups
        if seqs.has_states and total:
            starts = table_lens[growing]
            total = int(seqs.new_entries.count_blocks(starts, starts + num_new[growing]).sum())
        seqs.accesses.note(slots, self._clock.now)
        if total > pool.num_available or np.count_nonzero(seqs.may_copy[slots]):
            return self._reserve_in_order(owner, log, slots, least, wanted)
        if claims.claims:
            is_enough = total + claims.most_reserved <= pool.num_available
            if not is_enough and claims.are_later(slots[growing]).any():
                return self._reserve_in_order(owner, log, slots, least, wanted)
            claims.forget_claims(slots)
        seqs.grant(slots, held, wanted, owner.step_id)
        if not total:
            return Grants(wanted, NO_INT32, NO_INT32)
        places = table_lens[growing]
        if num_entries > len(growing):
            counts = num_new[growing]
            within = np.arange(num_entries) - np.repeat(np.cumsum(counts) - counts, counts)
            growing, places = np.repeat(growing, counts), np.repeat(places, counts) + within
        groups, has_block = NO_INT32, None
        if num_groups > 1:
            if seqs.has_states:
                has_block = seqs.new_entries.have_blocks(places, places + 1 == (table_lens + num_new)[growing])
            groups = np.repeat(np.arange(num_groups, dtype=np.int32), len(growing))
            growing, places = np.tile(growing, num_groups), np.tile(places, num_groups) + groups * seqs.max_blocks
        rows = slots[growing]
        if has_block is None:
            blocks = self._allocator.allocate(log, total, seqs.tenants[rows])
        else:
            blocks = np.zeros(len(rows), np.int32)
            blocks[has_block] = self._allocator.allocate(log, total, seqs.tenants[rows[has_block]])
        seqs.tables.set_blocks(rows, places, blocks)
        return Grants(wanted, growing.astype(np.int32), blocks, groups)

    def _until_part(self, slots: Int64Array, held: Int32Array, least: Int32Array, most: Int32Array) -> Int32Array:
        """[n] the most that grants go to, from held [n] to least [n] or more: not past where a sequence parts from another."""
        ends = self._sequences.part_lens[slots]
        return np.where((held < ends) & (least <= ends) & (most > ends), ends, most)

    def take_blocks(self, log: StepLog, slot: int, start: int, num_new: int) -> Int32Array:
        """[groups * num_new] blocks for new entries from `start` on, one group behind the other; 0 is a hole."""
        seqs = self._sequences
        if not seqs.has_states:
            return self._allocator.allocate(log, num_new * seqs.num_groups, seqs.tenants[slot])
        places = np.arange(start, start + num_new, dtype=np.int32)
        has_block = seqs.new_entries.have_blocks(places, places + 1 == start + num_new)
        blocks = np.zeros(len(has_block), np.int32)
        blocks[has_block] = self._allocator.allocate(log, int(np.count_nonzero(has_block)), seqs.tenants[slot])
        return blocks

    def copies_due(self, owner: SessionState, slot: int, wanted: int) -> Int64Array:
        """Places in [committed, wanted) of the tables whose blocks have another holder or reader, as the index is (R5)."""
        seqs, pool = self._sequences, self._pool
        if not seqs.may_copy[slot] or wanted <= seqs.num_committed[slot]:
            return np.empty(0, np.int64)
        first = int(seqs.num_committed[slot]) // self._block_size
        blocks, places = seqs.tables.get_from(slot, first), np.arange(first, len(seqs.tables.get(slot)))
        if seqs.num_groups > 1:
            places = np.concatenate([places + group * seqs.max_blocks for group in range(seqs.num_groups)])
        others = pool.fence_counts[blocks]
        if others.any():  # a session's own steps run in order, so its own fences do not matter here
            others = others - np.count_nonzero(owner.fenced_blocks()[:, None] == blocks, axis=0)
        return places[(pool.ref_counts[blocks] > 1) | pool.indexed[blocks] | (others > 0)]

    def copy_hit(self, owner: SessionState, log: StepLog, slot: int, wanted: int) -> None:
        """Copies what a start on a partly filled block writes next, now or later; there is room for it."""
        hit_len = int(self._sequences.num_committed[slot])
        if len(due := self.copies_due(owner, slot, max(wanted, hit_len + 1))):
            self._copy_on_write(owner, log, slot, due)
            self._sequences.grant_one(slot, hit_len, wanted, owner.step_id)

    def _reserve_in_order(
        self, owner: SessionState, log: StepLog, slots: Int64Array, least: Int32Array, wanted: Int32Array
    ) -> Grants:
        """The same, one by one: when blocks are short or reserved for an earlier arrival, or copies are due."""
        seqs, pool, claims = self._sequences, self._pool, self._claims
        reserved = np.empty(len(slots), np.int32)
        item_idx: list[int] = []
        new_blocks: list[int] = []
        of_groups: list[int] = []
        num_groups, entries = seqs.num_groups, seqs.new_entries
        refused: list[tuple[int, int]] = []  # slot, blocks asked for
        starved = False
        for row, (slot, low, want) in enumerate(zip(slots.tolist(), least.tolist(), wanted.tolist(), strict=True)):
            held = int(seqs.num_reserved[slot])
            table_len = seqs.num_blocks(held)
            due = self.copies_due(owner, slot, want)
            num_least = len(due) + entries.num_blocks(table_len, seqs.num_blocks(low))
            num_kept = claims.num_kept_from(slot) if claims.claims else 0
            may_take = not starved or (claims.claims and not num_kept)
            if may_take and not num_kept and num_least > pool.num_available:
                self._pin_preemption.make_pins_give_way(slot, num_least - pool.num_available, NO_INT32)
            num_room = (max(0, pool.num_available - num_kept) if may_take else 0) - len(due)
            granted, num_wanted = want, entries.num_blocks(table_len, seqs.num_blocks(want))
            if num_room < num_wanted:
                most = seqs.num_blocks(want) - table_len
                granted = max(held, (table_len + entries.most_entries(table_len, most, num_room)) * self._block_size)
            if granted < low or num_room < 0:
                # Blocks reserved for an older claim help no other claim, so later items are not held back for them.
                starved = starved or num_least > pool.num_available
                refused.append((slot, num_wanted + len(due)))
                reserved[row] = min(held, low - 1)
                self._counters.num_refusals += 1
                continue
            if claims.claims:
                claims.forget_claim(slot)
            if len(due):
                self._copy_on_write(owner, log, slot, due)
            num_new = seqs.num_blocks(granted) - table_len
            blocks = self.take_blocks(log, slot, table_len, num_new)
            if num_groups > 1:
                seqs.tables.place_further(slot, table_len, blocks.reshape(num_groups, num_new)[1:])
                of_groups.extend(np.repeat(np.arange(num_groups), num_new).tolist())
            seqs.tables.place(slot, table_len, blocks[:num_new])
            seqs.grant_one(slot, held, granted, owner.step_id)
            item_idx.extend([row] * len(blocks))
            new_blocks.extend(blocks.tolist())
            reserved[row] = granted
        for slot, num_blocks in refused:
            claims.add_claim(owner, slot, num_blocks)
        return Grants(reserved, *(np.array(column, np.int32) for column in (item_idx, new_blocks, of_groups)))

    def _copy_on_write(self, owner: SessionState, log: StepLog, slot: int, due: Int64Array) -> None:
        seqs = self._sequences
        sources = seqs.tables.rows[slot, due]
        copies = self._allocator.allocate_for_copies(len(due), int(seqs.tenants[slot]))
        seqs.tables.set_blocks(slot, due, copies)
        log.copy(sources.tolist(), copies.tolist())
        for table_idx, block in zip(due.tolist(), copies.tolist(), strict=True):
            log.update(int(seqs.ids[slot]), table_idx, block)
        owner.drop_blocks(self._pool, sources, until=owner.step_id)  # the copy still reads them
        self._counters.num_copies_on_write += len(due)
