"""What the items of a step do to sequences, their blocks and the index.

Owns the changes and their rules: sharing by forks, copy-on-write before a write (R5), fences on what is dropped (R6),
clearing before a block changes tenant (R8), all or nothing per item (R7). Every method takes lawful items and cannot fail.
Committed blocks come to be shared by publishing.py. Does not know how items arrive or what lawful is.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cache_service.block_pool import BlockPool
from cache_service.counters import Counters
from cache_service.eviction import Use
from cache_service.mover import Mover
from cache_service.owner import HeldLogits, Owner
from cache_service.pins import Pins
from cache_service.prefix_index import PrefixIndex
from cache_service.progress import Progress
from cache_service.publishing import Publisher
from cache_service.retention import drop_outside
from cache_service.sequence import SequenceTable
from cache_service.swapping import Swapping
from cache_service.transfers import Order
from cache_service.types import NO_INT32, NULL_BLOCK, UNKNOWN_ROOT, Int32Array, Int64Array, MatchEnd, PoolConfig, SequenceState


@dataclass(slots=True)
class StepLog:
    """What a step tells its engine, as lists, because they are short: orders and copies to run, replaced table entries, and
    slots of sequences that run now without having been started."""

    copy_sources: list[int] = field(default_factory=list)
    copy_destinations: list[int] = field(default_factory=list)
    update_ids: list[int] = field(default_factory=list)
    update_table_idx: list[int] = field(default_factory=list)
    update_blocks: list[int] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    computing_lens: dict[int, int] = field(default_factory=dict)  # slots told COMPUTING, and the lengths to come

    def update(self, sequence_id: int, table_idx: int, block: int) -> None:
        self.update_ids.append(sequence_id)
        self.update_table_idx.append(table_idx)
        self.update_blocks.append(block)


@dataclass(slots=True)
class Grants:
    """Answer to reservations: slots granted [n]; new blocks [m] and the index of the item each belongs to [m]."""

    reserved: Int32Array
    item_idx: Int32Array
    blocks: Int32Array


class Fit(NamedTuple):
    """A start: new blocks and slots that it would get, and how many blocks it lacks, 0 where it fits.

    num_wanted: available blocks that it would take for all that it asks for, those that it must leave alone included.
    """

    num_new: int
    num_slots: int
    num_short: int
    num_wanted: int


class BlockTables:
    """The operations on block tables."""

    def __init__(self, config: PoolConfig) -> None:
        self._block_size = config.block_size
        self._divisor, self._round_up = np.int32(config.block_size), np.int32(config.block_size - 1)
        self.prefix_caching = config.prefix_caching
        self.min_prefix_tokens = config.min_prefix_tokens
        self.sequences = SequenceTable(config)
        self.swapping: Swapping | None = None  # where there is a host tier
        self.index = PrefixIndex(
            config.num_blocks, config.block_size, config.logits_memory, config.num_host_blocks, self._lose_hosts
        )
        self.pool = BlockPool(config, self.index, self._forget)
        self.pins = Pins(self.pool)
        self.progress = Progress(self.sequences, self.pool)
        self.counters = Counters()
        self.publisher = Publisher(config, self.sequences, self.index, self.pool, self.counters)
        self.last_roots: Int32Array = np.zeros(config.num_blocks, np.int32)  # whose tokens each block held last
        if config.num_host_blocks:
            mover = Mover(config, self.index, self.pool, self.last_roots, self.publisher.disown)
            self.swapping = Swapping(self, mover)

    def commit(
        self,
        owner: Owner,
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

    def fork(self, parent: int, child_id: int, owner: Owner, num_tokens: int) -> int:
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
        seqs.start_numbers[child], seqs.last_access[child] = seqs.start_numbers[parent], self.progress.now
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

    def truncate(self, owner: Owner, slot: int, num_tokens: int) -> None:
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

    def release(self, owner: Owner, slots: list[int]) -> None:
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
        if self.swapping is not None:
            for slot in slots:
                self.swapping.release(owner, slot)
        self.publisher.forget_slots(slots)
        for slot in slots:
            if self.progress.claims:
                self.progress.forget(slot)
            owner.ids.remove(int(seqs.ids[slot]))
            owner.logits.pop(int(seqs.ids[slot]), None)
            seqs.free_slot(slot)

    def match(self, slot: int, max_hit: int) -> Int32Array:
        """[matched] nodes that a waiting sequence can start on; at least one token is left to compute (R4).

        None where they are too few to count as a hit.
        """
        seqs = self.sequences
        known = int(seqs.num_tokens[slot])
        num_most = min(max_hit, known - 1) // self._block_size if self.prefix_caching else 0
        num_most = min(num_most, int(seqs.share_limits[slot]))
        nodes = self.match_tokens(int(seqs.roots[slot]), seqs.tokens[slot, :known], num_most)
        return nodes if len(nodes) * self._block_size >= self.min_prefix_tokens else NO_INT32

    def match_tokens(self, root: int, tokens: Int32Array, max_blocks: int) -> Int32Array:
        """[matched] nodes of the longest prefix in any tier that is there now: no copy of it is still on its way."""
        nodes = self.index.match(root, tokens, max_blocks)
        if self.swapping is not None and len(nodes):
            hosts = self.index.host_of_node[nodes]
            is_away = (self.index.block_of_node[nodes] == 0) & self.swapping.host.is_filling[hosts]
            if np.count_nonzero(is_away):
                nodes = nodes[: int(np.argmax(is_away))]
        return nodes

    def full_hit(self, slot: int, max_hit: int) -> tuple[Int32Array, bytes] | None:
        """[num_tokens / block size] blocks of a waiting sequence's whole prompt, and the logits stored behind it."""
        seqs = self.sequences
        known = int(seqs.num_tokens[slot])
        num_blocks, rest = divmod(known, self._block_size)
        if rest or max_hit < known or known < self.min_prefix_tokens or num_blocks > seqs.share_limits[slot]:
            return None
        nodes = self.index.match(int(seqs.roots[slot]), seqs.tokens[slot, :known], num_blocks)
        blocks = self.index.block_of_node[nodes]
        if np.count_nonzero(blocks) < num_blocks:
            return None
        logits = self.index.logits.get(int(nodes[-1]))
        return None if logits is None else (blocks, logits)

    def start(
        self, owner: Owner, log: StepLog, slot: int, max_hit: int, max_new: int, *, num_spare: int, exactly: int = 0
    ) -> bool:
        """Admits a waiting sequence with 1 to max_new slots beyond its hit, or with `exactly` so many; or changes nothing.

        Takes at most max_hit tokens from the index, and leaves at least one to compute (R4), or else finds the logits that
        follow the whole prompt, which the owner then holds; leaves num_spare blocks alone.
        Look-up, hold and first reservation are one decision, so nobody steals the match. Where a part of the hit is in the
        host tier only, it is LOADING afterwards; for want of room for that it starts on what is on the device. While an elder
        sequence is owed blocks it is refused. A refusal is a claim, but not with `exactly`: that one is an error and leaves no
        trace.
        """
        seqs, pool = self.sequences, self.pool
        known = int(seqs.num_tokens[slot])
        full = self.full_hit(slot, max_hit) if self.index.logits.by_node and not exactly else None
        nodes = self.match(slot, max_hit) if full is None else self.index.node_of_block[full[0]]
        hits, joined, num_least = self.index.block_of_node[nodes], None, int(full is None)
        if self.swapping is not None and np.count_nonzero(hits) < len(hits):
            joined = self.swapping.join(owner, nodes, hits)
        fit = self._fit(hits, known, num_least, max_new, num_spare, exactly)
        if fit.num_short and joined is not None:
            on_device = self.index.block_of_node[nodes] > 0
            nodes, joined = nodes[: int(np.argmin(on_device))], None
            if len(nodes) * self._block_size < self.min_prefix_tokens:
                nodes = NO_INT32
            hits = self.index.block_of_node[nodes]
            fit = self._fit(hits, known, num_least, max_new, num_spare, exactly)
        is_younger = bool(self.progress.claims) and self.progress.is_younger(slot)
        if fit.num_short and not is_younger and self.pins_give_way(slot, fit.num_short, hits):
            return self.start(owner, log, slot, max_hit, max_new, num_spare=num_spare, exactly=exactly)
        if fit.num_short or is_younger:
            self.counters.num_refusals += 1
            self.counters.num_refused_starts += 1
            if not exactly:
                self.progress.refuse(owner, slot, max(1, fit.num_wanted))
            return False
        if self.progress.claims:
            self.progress.forget(slot)
        num_new, most = fit.num_new, fit.num_slots
        hit_len = len(hits) * self._block_size
        if joined is not None and self.swapping is not None:
            self.swapping.start(owner, slot, nodes, hits, joined)
        else:
            pool.acquire(hits)
        seqs.tables[slot, : len(hits)] = hits
        seqs.tables[slot, len(hits) : len(hits) + num_new] = self._allocate(log, num_new, seqs.roots[slot])
        is_look_up = max_hit > 0 and self.prefix_caching
        self.counters.num_look_ups += is_look_up
        self.counters.num_look_up_tokens += known * is_look_up
        self.counters.num_starts += 1
        seqs.num_hit[slot] = hit_len
        seqs.num_reserved[slot] = most
        seqs.last_reserve_step[slot] = owner.step_id
        seqs.touch(slot, self.progress.now)
        if joined is not None:
            seqs.states[slot] = SequenceState.LOADING
            return True
        for column in (seqs.num_committed, seqs.num_reserved_before):
            column[slot] = hit_len
        seqs.num_published[slot] = len(hits)
        seqs.last_nodes[slot] = nodes[-1] if len(nodes) else seqs.roots[slot]
        seqs.states[slot] = SequenceState.RUNNING
        if full is not None:
            owner.logits[int(seqs.ids[slot])] = HeldLogits(owner.step_id, full[1])
            self.counters.num_full_hits += 1
        self.counters.num_hits += is_look_up and len(hits) > 0
        self.counters.num_hit_tokens += hit_len
        return True

    def _fit(self, hits: Int32Array, known: int, num_least: int, max_new: int, num_spare: int, exactly: int) -> Fit:
        """How a start on these blocks fits; the zeros are to be loaded, and take a block each."""
        hit_len = len(hits) * self._block_size
        least, most = hit_len + num_least, min(hit_len + max_new, known)
        if exactly:
            least = most = max(exactly, hit_len)
        num_loads = len(hits) - int(np.count_nonzero(hits))
        num_apart = self.pool.num_revived(hits) + num_spare + num_loads  # available, but not for new blocks
        num_room = self.pool.num_available - num_apart
        num_new = self.sequences.num_blocks(most) - len(hits)
        num_short, num_wanted = 0, num_new + num_apart
        if num_new > num_room:
            num_new = max(num_room, 0)
            most = (len(hits) + num_new) * self._block_size
        if most < least or (num_loads and num_room < 0):
            num_short = self.sequences.num_blocks(least) - len(hits) - num_room
        return Fit(num_new, most, num_short, num_wanted)

    def reserve(self, owner: Owner, log: StepLog, slots: Int64Array, least: Int32Array, most: Int32Array) -> Grants:
        """Grants each sequence slots up to most[i], in order; see the protocol for who is refused."""
        seqs = self.sequences
        held = seqs.num_reserved[slots]
        wanted = np.maximum(held, most)
        table_lens = (held + self._round_up) // self._divisor
        num_new = (wanted + self._round_up) // self._divisor - table_lens
        growing = num_new.nonzero()[0]
        total = int(num_new.sum()) if len(growing) else 0
        seqs.note_access(slots, self.progress.now)
        if total > self.pool.num_available or np.count_nonzero(seqs.may_copy[slots]):
            return self._reserve_in_order(owner, log, slots, least, wanted)
        if self.progress.claims:
            is_enough = total + self.progress.most_owed <= self.pool.num_available
            if not is_enough and self.progress.are_younger(slots[growing]).any():
                return self._reserve_in_order(owner, log, slots, least, wanted)
            self.progress.forget_all(slots)
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

    def copies_due(self, owner: Owner, slot: int, wanted: int) -> Int64Array:
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

    def could_pins_give_way(self, slot: int | None, num_short: int, hits: Int32Array) -> bool:
        """Whether so many blocks, beside these hits, would come free of pins for a sequence that could not go on otherwise.

        Only for one that runs alone: whatever else holds blocks ends some day, and fences are lifted soon.
        """
        if not self.pins or num_short <= self.pool.num_fenced:
            return False
        states = self.sequences.states
        holding = np.flatnonzero((states == SequenceState.RUNNING) | (states == SequenceState.LOADING))
        is_alone = all(other == slot for other in holding.tolist())
        return is_alone and self.pins.could_give_way(num_short, hits)

    def pins_give_way(self, slot: int, num_short: int, hits: Int32Array) -> bool:
        """The same, done where it can be."""
        gives_way = self.could_pins_give_way(slot, num_short, hits)
        if gives_way:
            self.pins.give_way(num_short, hits)
        return gives_way

    def distrust(self, blocks: Int32Array) -> None:
        """What was ordered for these blocks may never have run: whoever gets one next, it is cleared first (R8)."""
        self.last_roots[blocks] = UNKNOWN_ROOT

    def _reserve_in_order(self, owner: Owner, log: StepLog, slots: Int64Array, least: Int32Array, wanted: Int32Array) -> Grants:
        """The same, one by one: when blocks are short or owed to an elder sequence, or copies are due."""
        seqs, pool, progress = self.sequences, self.pool, self.progress
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
            num_kept = progress.num_kept_from(slot) if progress.claims else 0
            may_take = not starved or (progress.claims and not num_kept)
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
            if progress.claims:
                progress.forget(slot)
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
            progress.refuse(owner, slot, num_blocks)
        return Grants(reserved, np.array(item_idx, np.int32), np.array(new_blocks, np.int32))

    def _copy_on_write(self, owner: Owner, log: StepLog, slot: int, due: Int64Array) -> None:
        seqs = self.sequences
        sources = seqs.tables[slot, due]
        copies = self.pool.allocate(len(due))
        self.last_roots[copies] = seqs.roots[slot]
        seqs.tables[slot, due] = copies
        seqs.last_copy_step[slot] = owner.step_id
        log.copy_sources.extend(sources.tolist())
        log.copy_destinations.extend(copies.tolist())
        for table_idx, block in zip(due.tolist(), copies.tolist(), strict=True):
            log.update(int(seqs.ids[slot]), table_idx, block)
        owner.drop(self.pool, sources, until=owner.step_id)  # the copy still reads them
        self.counters.num_copies_on_write += len(due)

    def _allocate(self, log: StepLog, count: int, roots: Int32Array) -> Int32Array:
        """[count] blocks for sequences under these roots ([count] or a scalar); another tenant's are cleared first (R8)."""
        blocks = self.pool.allocate(count)
        if self.index.num_roots > 1:
            before = self.last_roots[blocks]
            foreign = blocks[(before != 0) & (before != roots)].tolist()
            log.copy_sources.extend([NULL_BLOCK] * len(foreign))
            log.copy_destinations.extend(foreign)
            self.counters.num_cleared_blocks += len(foreign)
        self.last_roots[blocks] = roots
        return blocks

    def _use(self, slot: int) -> Use:
        seqs = self.sequences
        num_published = int(seqs.num_published[slot])
        return Use(
            blocks=seqs.tables[slot, :num_published],
            tokens=seqs.tokens[slot, : num_published * self._block_size],
            root=int(seqs.roots[slot]),
            priority=int(seqs.priorities[slot]),
            num_blocks=len(seqs.table(slot)),
        )

    def shown_table(self, slot: int) -> Int32Array:
        """The table as its owner sees it: a swapped sequence has none."""
        table = self.sequences.table(slot)
        return table[:0] if self.sequences.states[slot] == SequenceState.SWAPPED else table

    def unpublish(self, slot: int) -> None:
        """The index knows nothing of this table for now."""
        self.sequences.num_published[slot] = 0
        self.sequences.last_nodes[slot] = self.sequences.roots[slot]

    def publish_again(self, owner: Owner, slot: int) -> None:
        """The table is published from its first block."""
        self.unpublish(slot)
        if self.prefix_caching:
            self.publisher.note(owner, np.array([slot]))

    def _forget(self, blocks: Int32Array, why: MatchEnd) -> Int32Array:
        """These leave the device: for the host tier, or for good with what is below. Answers others that lost their entry."""
        if self.swapping is not None and why is MatchEnd.EVICTED:
            blocks = self.swapping.mover.demote(blocks)
        return self.publisher.forget(blocks, why)

    def _lose_hosts(self, hosts: Int32Array) -> None:
        """Their nodes were forgotten."""
        assert self.swapping is not None, "host copies without a host tier"
        self.swapping.host.pool.unindex(hosts)
