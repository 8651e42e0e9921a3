"""Puts committed blocks into the index, after the reply to the step that committed them.

Owns which sequences are behind, the adoption of duplicates, and what tables know of the index. Rules: a commit only notes its
slots; `publish` works them off in the order of the commits, in slices where the caller asks for slices; of content that is
known already the indexed block goes into the table, and the session hears of it in its next reply; what it gives up waits for
the steps in flight that may touch it. A caller that cuts a sequence publishes first, one that releases sequences publishes
those. Does not know steps or sessions, only SessionState.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from ..blocks.block_pool import BlockPool
from ..index.prefix_index import PrefixIndex
from ..values.counters import Counters
from ..values.distinct import distinct
from ..values.pool_config import PoolConfig
from ..values.types import NO_INT64, Int32Array, Int64Array, MatchEnd, ReuseHint, SequenceState
from .sequence_table import SequenceTable
from .session_state import SessionState, TableUpdates

ALL_BLOCKS = 2**31
_RUNNING = np.int8(SequenceState.RUNNING)
_MOST_PENDING = 256  # commits that may wait; only a caller that never publishes meets it


class Publisher:
    """The link between block tables and the prefix index of one pool. Where prefixes are not cached it notes nothing."""

    def __init__(
        self, config: PoolConfig, sequences: SequenceTable, index: PrefixIndex, pool: BlockPool, counters: Counters
    ) -> None:
        self._is_on = config.prefix_caching
        self._block_size = config.block_size
        self._offsets = np.arange(config.block_size, dtype=np.int32)
        self._sequences = sequences
        self._index = index
        self._pool = pool
        self._counters = counters
        self._num_pauses = 0
        self._pending: deque[tuple[SessionState, Int64Array]] = deque()  # slots of commits; a slot may have nothing to publish
        self._waiting: list[tuple[SessionState, Int64Array]] = []  # slots whose next block is filled by a copy in flight

    def note_commits(self, owner: SessionState, slots: Int64Array) -> None:
        """Notes commits of these sequences. A step pays nothing more for publishing before its reply."""
        if not self._is_on or self.is_paused:
            return
        if len(self._pending) == _MOST_PENDING:
            self.publish(reported_now=owner)
        self._pending.append((owner, slots))

    def publish(self, max_blocks: int = ALL_BLOCKS, *, reported_now: SessionState | None = None) -> bool:
        """Publishes up to max_blocks pending blocks. Returns whether more are left. A block that a copy in flight fills waits.

        reported_now: the session whose reply, not written yet, reports its table updates; others get theirs in the next one.
        """
        pending = self._pending
        if self._waiting:
            pending.extendleft(reversed(self._waiting))
            self._waiting.clear()
        while pending and max_blocks > 0:
            max_blocks -= self._publish_commit(*pending.popleft(), max_blocks, reported_now)
        return bool(pending)

    def publish_slots(self, owner: SessionState, slots: Int64Array, *, reported_now: SessionState) -> None:
        """Publishes what can be of these sequences of one session, which are about to end. The others stay pending."""
        if self._is_on and not self.is_paused:
            self._publish_commit(owner, slots, ALL_BLOCKS, reported_now)

    def pending_slots(self) -> Int64Array:
        """[n] sequences with pending blocks."""
        noted = [slots for _, slots in (*self._pending, *self._waiting)]
        slots = noted[0] if len(noted) == 1 else np.concatenate([NO_INT64, *noted])
        return slots[self._num_to_publish(slots) > self._sequences.num_published[slots]]

    def is_noted(self, slot: int) -> bool:
        """Whether committed blocks of the sequence are published later: after the answer, or once a copy in flight has run.

        Everything else was published, if it ever is.
        """
        return any(np.count_nonzero(slots == slot) for _, slots in (*self._pending, *self._waiting))

    def forget_slots(self, slots: list[int]) -> None:
        """These sequences end. Everything else of them was published before."""
        if self._waiting:
            self._waiting = [noted for noted in _without(self._waiting, slots) if len(noted[1])]
        if self._pending:
            self._pending = deque(_without(self._pending, slots))

    @property
    def is_paused(self) -> bool:
        return self._num_pauses > 0

    def pause(self) -> None:
        """Nothing is published until it is resumed, and no commits are noted; pauses count."""
        self._num_pauses += 1
        self._pending.clear()
        self._waiting.clear()

    def resume(self) -> None:
        self._num_pauses -= 1

    def forget_blocks(self, blocks: Int32Array, cause: MatchEnd = MatchEnd.EVICTED) -> Int32Array:
        """Un-indexes blocks and those below them. Returns the others that lost their entry."""
        lost = self._index.forget_blocks(blocks, cause)
        if len(lost):
            self.disown()
        return lost

    def forget_nodes(self, nodes: Int32Array, cause: MatchEnd) -> Int32Array:
        """Un-indexes nodes and those below them. Returns the blocks that lost their entry."""
        lost = self._index.forget_nodes(nodes, cause)
        self.disown()
        return lost

    def disown(self) -> None:
        """Nodes were forgotten: tables that lose one publish again from their first block."""
        seqs = self._sequences
        running = seqs.running_slots()
        gone = self._index.block_of_node[np.maximum(seqs.last_nodes[running], 0)] == 0
        seqs.unpublish(running[gone & (seqs.last_nodes[running] > 0)])

    def publish_again(self, owner: SessionState, slot: int) -> None:
        """The table is published from its first block."""
        self._sequences.unpublish(slot)
        self.note_commits(owner, np.array([slot]))

    def set_published(self, slot: int, num_published: int, *, like: int) -> None:
        """The first num_published blocks of a table are indexed, as they are in the row `like`."""
        seqs = self._sequences
        if num_published == seqs.num_published[like]:
            node = int(seqs.last_nodes[like])
        elif num_published:
            node = int(self._index.node_of_block[seqs.tables.rows[like, num_published - 1]])
        else:
            node = int(seqs.roots[like])
        seqs.set_published(slot, num_published, node)

    def publish_at_most(self, slot: int, num_blocks: int) -> None:
        """From now on nothing of the sequence from this table index on is published."""
        seqs = self._sequences
        seqs.limit_sharing(slot, num_blocks)
        if seqs.num_published[slot] > num_blocks:
            self.set_published(slot, num_blocks, like=slot)

    def check(self) -> list[str]:
        """The broken invariants, for audits: every pending slot belongs to a living sequence of its session."""
        seqs, wrong = self._sequences, list[str]()
        for owner, slots in (*self._pending, *self._waiting):
            strange = (seqs.owners[slots] != owner.number) | (seqs.states[slots] == SequenceState.FREE_SLOT)
            wrong.extend(f"slot {slot} is to be published and has no such sequence" for slot in slots[strange].tolist())
        return wrong

    def _publish_commit(
        self, owner: SessionState, slots: Int64Array, max_blocks: int, reported_now: SessionState | None
    ) -> int:
        """Publishes one commit; the blocks beyond the bound go back to the front. Returns the number of blocks."""
        seqs = self._sequences
        first, last = seqs.num_published[slots], self._num_to_publish(slots)
        behind = (last > first).nonzero()[0]
        behind = behind[seqs.states[slots[behind]] == _RUNNING]
        if not len(behind):
            return 0
        slots, first, last = slots[behind], first[behind], last[behind]
        waiting = self._stop_at_copies(slots, first, last) if owner.copies and len(slots) else NO_INT64
        ends = np.cumsum(last - first)
        if len(ends) and ends[-1] > max_blocks:
            cut = int(np.searchsorted(ends, max_blocks, side="right"))  # the first that does not fit whole
            self._pending.appendleft((owner, slots[cut:]))
            last[cut] -= ends[cut] - max_blocks
            slots, first, last, waiting = slots[: cut + 1], first[: cut + 1], last[: cut + 1], waiting[waiting < cut]
        if len(waiting):
            self._waiting.append((owner, slots[waiting]))
        until = owner.step_id - (owner is reported_now)
        self._publish(owner, until, slots, first, last)
        return int((last - first).sum())

    def _stop_at_copies(self, slots: Int64Array, first: Int32Array, last: Int32Array) -> Int64Array:
        """Lowers last [n] to the first block that a copy in flight fills: others must not read it yet. Returns which it did."""
        counts = last - first
        of = np.repeat(np.arange(len(slots)), counts)
        places = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(len(of))
        is_filling, seqs = self._pool.is_filling, self._sequences
        filling = is_filling[seqs.tables.rows[slots[of], places]].nonzero()[0]
        for group in range(1, seqs.num_groups):
            filling = np.append(filling, is_filling[seqs.tables.rows[slots[of], places + group * seqs.max_blocks]].nonzero()[0])
        np.minimum.at(last, of[filling], places[filling].astype(np.int32))
        return distinct(of[filling])

    def _num_to_publish(self, slots: Int64Array) -> Int32Array:
        """[n] leading blocks that are full, committed, and not kept private by retention."""
        seqs = self._sequences
        num_full = seqs.num_committed[slots] // self._block_size
        return np.minimum(num_full, seqs.share_limits[slots]) if seqs.num_retaining else num_full

    def _publish(self, owner: SessionState, until: int, slots: Int64Array, first: Int32Array, last: Int32Array) -> None:
        """Puts blocks [first, last) of each table into the index, in list order. Ranges may be empty."""
        counts = last - first
        if not counts.all():  # what waits for a copy, or is too much, has none
            due = counts > 0
            slots, first, last, counts = slots[due], first[due], last[due], counts[due]
        done = 0
        for at in (counts > 1).nonzero()[0].tolist():
            self._publish_each(owner, until, slots[done:at], first[done:at])
            self._publish_run(owner, until, int(slots[at]), int(first[at]), int(last[at]))
            done = at + 1
        self._publish_each(owner, until, slots[done:], first[done:])

    def _publish_each(self, owner: SessionState, until: int, slots: Int64Array, places: Int32Array) -> None:
        """One block of each sequence, the one at its table index places[i]."""
        if len(slots):
            seqs = self._sequences
            tokens = seqs.tokens.rows(slots)[slots[:, None], (places * self._block_size)[:, None] + self._offsets]
            nodes = self._index.insert_each(seqs.last_nodes[slots], tokens, seqs.tables.rows[slots, places])
            self._settle(owner, until, slots, places, nodes)
            seqs.set_published(slots, places + np.int32(1), nodes)

    def _publish_run(self, owner: SessionState, until: int, slot: int, start: int, end: int) -> None:
        """Consecutive blocks of one sequence."""
        seqs, size = self._sequences, self._block_size
        tokens = seqs.tokens.rows(slot)[slot, start * size : end * size]
        nodes = self._index.insert_run(int(seqs.last_nodes[slot]), tokens, seqs.tables.rows[slot, start:end])
        self._settle(owner, until, np.full(end - start, slot), np.arange(start, end, dtype=np.int32), nodes)
        seqs.set_published(slot, end, nodes[-1])

    def _settle(self, owner: SessionState, until: int, slots: Int64Array, places: Int32Array, nodes: Int32Array) -> None:
        """Marks published blocks as indexed, and adopts the indexed block where the content was known."""
        seqs, pool = self._sequences, self._pool
        own = seqs.tables.rows[slots, places]
        known = self._index.block_of_node[nodes]
        twice = known != own
        hints = None if pool.reuse is None else seqs.reuse_hints[slots]
        if pool.reuse is not None:
            pool.reuse.note_new(known[~pool.indexed[known] & (hints == ReuseHint.NONE)])
        num_new = pool.mark_indexed(known)
        if np.count_nonzero(twice):
            self._adopt(owner, until, slots[twice], places[twice], own[twice], known[twice])
        if pool.reuse is not None:
            pool.reuse.record.num_published += num_new
            pool.reuse.claim(known[hints != ReuseHint.NONE])
        for group in range(1, seqs.num_groups):
            self._settle_group(owner, until, group, slots, places + np.int32(group * seqs.max_blocks), nodes)

    def _settle_group(
        self, owner: SessionState, until: int, group: int, slots: Int64Array, places: Int32Array, nodes: Int32Array
    ) -> None:
        """The same for one group behind the first, as far as its window has left the blocks in the table.

        Of states the checkpoints and those where it parts from another sequence: any other full block is given back soon, and
        would be cached for nothing.
        """
        own, entries = self._sequences.tables.rows[slots, places], self._sequences.new_entries
        is_there = own > 0
        if entries.periods[group]:
            table_idx = places - np.int32(group * self._sequences.max_blocks)
            is_part = (table_idx + 1) * self._block_size == self._sequences.part_lens[slots]
            is_there &= entries.are_checkpoints(group, table_idx) | is_part
        there = is_there.nonzero()[0]
        if not len(there):
            return
        slots, places, own = slots[there], places[there], own[there]
        known = self._index.add_group_blocks(group, nodes[there], own)
        self._pool.mark_indexed(known)
        twice = known != own
        if np.count_nonzero(twice):
            self._adopt(owner, until, slots[twice], places[twice], own[twice], known[twice])

    def _adopt(
        self,
        owner: SessionState,
        until: int,
        slots: Int64Array,
        places: Int32Array,
        own: Int32Array,
        known: Int32Array,
    ) -> None:
        """Indexed blocks take the place of a table's own; entries [n]."""
        seqs, pool = self._sequences, self._pool
        pool.acquire(known, is_found=False)
        seqs.tables.set_blocks(slots, places, known)
        owner.updates.append(TableUpdates(slots, seqs.ids[slots], places, known))
        # Steps in flight may still read the duplicate, so it is fenced like everything that is dropped.
        owner.drop_blocks(pool, own[::-1].copy(), until=until)
        self._counters.num_adopted_blocks += len(own)


def _without(noted: Iterable[tuple[SessionState, Int64Array]], slots: list[int]) -> Iterator[tuple[SessionState, Int64Array]]:
    """Notes without these slots."""
    for owner, noted_slots in noted:
        is_left = noted_slots != slots[0] if len(slots) == 1 else ~np.isin(noted_slots, slots)
        yield owner, noted_slots[is_left]
