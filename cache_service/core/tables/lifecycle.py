"""What the items of a step do to sequences, their blocks and the index.

Owns the changes and their rules: sharing by forks, copy-on-write before a write (R5), fences on what is dropped (R6), all or
nothing per item (R7). Every method takes lawful items and cannot fail. Starts are start.py's, blocks table_base.py's.
Committed blocks come to be shared by publisher.py. Does not know how items arrive or what lawful is.
"""

import numpy as np

from ..sequences.retention import drop_outside
from ..sequences.session_state import SessionState
from ..tiers.offload import Offloader
from ..tiers.sequence_swap import SequenceSwapper
from ..values.pool_config import PoolConfig
from ..values.types import NO_INT32, NULL_BLOCK, Int32Array, Int64Array, SequenceState
from .start import SequenceStarter
from .table_base import Grants, StepLog


class SequenceLifecycle(SequenceStarter):
    """The operations on block tables."""

    def __init__(self, config: PoolConfig) -> None:
        super().__init__(config)
        if config.num_host_blocks:
            offloader = Offloader(config, self.index, self.pool, self.last_roots, self.publisher.disown)
            self.swapper = SequenceSwapper(self, offloader)

    def commit(
        self,
        owner: SessionState,
        slots: Int64Array,
        lens: Int32Array,
        num_new: Int32Array,
        tokens: Int32Array,
        *,
        one_each: bool,
    ) -> None:
        """Appends num_new[i] of the concatenated tokens to each sequence and commits it up to lens[i]; not published yet.

        one_each: every num_new is 1.
        """
        seqs = self.sequences
        if len(tokens):
            known = seqs.num_tokens[slots]
            if one_each:
                seqs.note_tokens(slots, known, tokens)
            else:
                within = np.arange(len(tokens)) - np.repeat(np.cumsum(num_new) - num_new, num_new)
                seqs.tokens[np.repeat(slots, num_new), np.repeat(known, num_new) + within] = tokens
            seqs.num_tokens[slots] = known + num_new
        seqs.num_committed[slots] = lens
        if self.prefix_caching:
            self.publisher.note(owner, slots)
        if seqs.num_retaining:
            drop_outside(self, owner, slots, told_now=True)

    def fork(self, parent: int, child_id: int, owner: SessionState, num_tokens: int) -> int:
        """Makes a child on the parent's first blocks and answers its slot; needs a free one."""
        seqs = self.sequences
        num_blocks, num_full = seqs.num_blocks(num_tokens), num_tokens // self._block_size
        child = seqs.take_slot()
        blocks = seqs.tables[parent, :num_blocks]
        self.pool.acquire(blocks[blocks != NULL_BLOCK] if seqs.hole_ends[parent] else blocks)
        seqs.tables[child, :num_blocks] = blocks
        seqs.tokens[child, :num_tokens] = seqs.tokens[parent, :num_tokens]
        for column in (seqs.num_tokens, seqs.num_committed, seqs.num_reserved, seqs.num_prompt):
            column[child] = num_tokens
        for column in (seqs.owners, seqs.roots, seqs.max_tokens, seqs.priorities, seqs.num_hit):
            column[child] = column[parent]
        seqs.start_numbers[child], seqs.last_access[child] = seqs.start_numbers[parent], self.claims.now
        seqs.ids[child], seqs.parent_ids[child] = child_id, seqs.ids[parent]
        seqs.states[child] = SequenceState.RUNNING
        if seqs.num_window[parent]:
            seqs.retain(child, int(seqs.num_sink[parent]), int(seqs.num_window[parent]))
            if seqs.hole_ends[parent] <= num_blocks:  # else it is cut before the holes
                seqs.hole_ends[child], seqs.share_limits[child] = seqs.hole_ends[parent], seqs.share_limits[parent]
        self.publisher.set_published(child, min(num_full, int(seqs.num_published[parent])), like=parent)
        if num_tokens % self._block_size:
            seqs.may_copy[[parent, child]] = True
        owner.ids.add(child_id, child)
        self.counters.num_forks += 1
        return child

    def truncate(self, owner: SessionState, slot: int, num_tokens: int) -> None:
        seqs = self.sequences
        table = seqs.table(slot)
        num_kept = min(seqs.num_blocks(num_tokens), len(table))
        dropped = table[num_kept:][::-1].copy()
        if seqs.hole_ends[slot] > num_kept:  # cut before the holes
            dropped = dropped[dropped != NULL_BLOCK]
            seqs.close_hole(slot)
        for column in (seqs.num_tokens, seqs.num_committed, seqs.num_reserved, seqs.num_reserved_before):
            column[slot] = min(int(column[slot]), num_tokens)
        num_full = int(seqs.num_committed[slot]) // self._block_size
        if num_full < seqs.num_published[slot]:
            self.publisher.set_published(slot, num_full, like=slot)
        seqs.may_copy[slot] = True
        if len(dropped):
            owner.drop(self.pool, dropped, until=owner.step_id - 1)

    def release(self, owner: SessionState, slots: list[int]) -> None:
        """Gives back all blocks of these sequences and forgets them."""
        seqs = self.sequences
        running = [slot for slot in slots if seqs.states[slot] == SequenceState.RUNNING]
        if self.pool.policy.wants_uses:
            for slot in running:
                self.pool.policy.use(self._use(slot))
        # Deepest first, so that leaves are evicted before their parents.
        tables = [seqs.held(slot)[::-1] for slot in running]
        if tables:
            owner.drop(self.pool, np.concatenate(tables), until=owner.step_id - 1)
        if self.swapper is not None:
            for slot in slots:
                self.swapper.release(owner, slot)
        self.publisher.forget_slots(slots)
        for slot in slots:
            if self.claims.claims:
                self.claims.forget(slot)
            owner.ids.remove(int(seqs.ids[slot]))
            owner.logits.pop(int(seqs.ids[slot]), None)
            seqs.free_slot(slot)

    def reserve(self, owner: SessionState, log: StepLog, slots: Int64Array, least: Int32Array, most: Int32Array) -> Grants:
        """Grants each sequence slots up to most[i], in order; see the protocol for who is refused."""
        seqs = self.sequences
        held = seqs.num_reserved[slots]
        wanted = np.maximum(held, most)
        table_lens = (held + self._round_up) // self._divisor
        num_new = (wanted + self._round_up) // self._divisor - table_lens
        growing = num_new.nonzero()[0]
        total = int(num_new.sum()) if len(growing) else 0
        seqs.note_access(slots, self.claims.now)
        if total > self.pool.num_available or np.count_nonzero(seqs.may_copy[slots]):
            return self._reserve_in_order(owner, log, slots, least, wanted)
        if self.claims.claims:
            is_enough = total + self.claims.most_owed <= self.pool.num_available
            if not is_enough and self.claims.are_younger(slots[growing]).any():
                return self._reserve_in_order(owner, log, slots, least, wanted)
            self.claims.forget_all(slots)
        seqs.num_reserved_before[slots] = held
        seqs.num_reserved[slots] = wanted
        seqs.last_reserve_step[slots] = owner.step_id
        if not total:
            return Grants(wanted, NO_INT32, NO_INT32)
        places = table_lens[growing]
        if total > len(growing):
            counts = num_new[growing]
            within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
            growing, places = np.repeat(growing, counts), np.repeat(places, counts) + within
        rows = slots[growing]
        blocks = self._allocate(log, total, seqs.roots[rows])
        seqs.tables[rows, places] = blocks
        return Grants(wanted, growing.astype(np.int32), blocks)

    def copies_due(self, owner: SessionState, slot: int, wanted: int) -> Int64Array:
        """Table indices in [committed, wanted) whose blocks somebody else holds or still reads; the index is a holder (R5)."""
        seqs, pool = self.sequences, self.pool
        if not seqs.may_copy[slot] or wanted <= seqs.num_committed[slot]:
            return np.empty(0, np.int64)
        first = int(seqs.num_committed[slot]) // self._block_size
        blocks = seqs.table(slot)[first:]
        others = pool.fence_counts[blocks]
        if others.any():  # a session's own steps run in order, so its own fences do not matter here
            others = others - np.count_nonzero(owner.fenced_blocks()[:, None] == blocks, axis=0)
        return first + np.flatnonzero((pool.ref_counts[blocks] > 1) | pool.indexed[blocks] | (others > 0))

    def _reserve_in_order(
        self, owner: SessionState, log: StepLog, slots: Int64Array, least: Int32Array, wanted: Int32Array
    ) -> Grants:
        """The same, one by one: when blocks are short or owed to an elder sequence, or copies are due."""
        seqs, pool, claims = self.sequences, self.pool, self.claims
        reserved = np.empty(len(slots), np.int32)
        item_idx: list[int] = []
        new_blocks: list[int] = []
        refused: list[tuple[int, int]] = []  # slot, blocks asked for
        starved = False
        for row, (slot, low, want) in enumerate(zip(slots.tolist(), least.tolist(), wanted.tolist(), strict=True)):
            held = int(seqs.num_reserved[slot])
            table_len = seqs.num_blocks(held)
            due = self.copies_due(owner, slot, want)
            num_least = len(due) + max(seqs.num_blocks(low) - table_len, 0)
            num_kept = claims.num_kept_from(slot) if claims.claims else 0
            may_take = not starved or (claims.claims and not num_kept)
            if may_take and not num_kept and num_least > pool.num_available:
                self.pins_give_way(slot, num_least - pool.num_available, NO_INT32)
            num_room = (max(0, pool.num_available - num_kept) if may_take else 0) - len(due)
            granted = want
            if num_room < seqs.num_blocks(want) - table_len:
                granted = max(held, (table_len + max(num_room, 0)) * self._block_size)
            if granted < low or num_room < 0:
                # Whom only an elder one's blocks would help does not stand in anybody's way, the elder one's least of all.
                starved = starved or num_least > pool.num_available
                refused.append((slot, seqs.num_blocks(want) - table_len + len(due)))
                reserved[row] = min(held, low - 1)
                self.counters.num_refusals += 1
                continue
            if claims.claims:
                claims.forget(slot)
            if len(due):
                self._copy_on_write(owner, log, slot, due)
            if granted > seqs.num_committed[slot]:
                seqs.may_copy[slot] = False
            blocks = self._allocate(log, seqs.num_blocks(granted) - table_len, seqs.roots[slot])
            seqs.tables[slot, table_len : table_len + len(blocks)] = blocks
            seqs.num_reserved_before[slot] = held
            seqs.num_reserved[slot] = granted
            seqs.last_reserve_step[slot] = owner.step_id
            item_idx.extend([row] * len(blocks))
            new_blocks.extend(blocks.tolist())
            reserved[row] = granted
        for slot, num_blocks in refused:
            claims.refuse(owner, slot, num_blocks)
        return Grants(reserved, np.array(item_idx, np.int32), np.array(new_blocks, np.int32))

    def _copy_on_write(self, owner: SessionState, log: StepLog, slot: int, due: Int64Array) -> None:
        seqs = self.sequences
        sources = seqs.tables[slot, due]
        copies = self.pool.allocate(len(due))
        self.last_roots[copies] = seqs.roots[slot]
        seqs.tables[slot, due] = copies
        log.copy_sources.extend(sources.tolist())
        log.copy_destinations.extend(copies.tolist())
        for table_idx, block in zip(due.tolist(), copies.tolist(), strict=True):
            log.update(int(seqs.ids[slot]), table_idx, block)
        owner.drop(self.pool, sources, until=owner.step_id)  # the copy still reads them
        self.counters.num_copies_on_write += len(due)
