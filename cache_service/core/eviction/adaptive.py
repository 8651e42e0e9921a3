"""Keeps the blocks that are likely to be used again, as far as the past shows; else evicts in least recently used order.

Most cached prompts are never seen again, and a queue that is emptied in the order of use spends nearly all of a small cache on
them: each waits as long as a block that ten requests shared, and both are evicted before their next use. What distinguishes the
two is not known beforehand (how long until a conversation goes on, how many documents are read twice), so it is learned.

How it works. Each block has a class (use_history.py): how often it was used, in which turn of a conversation, whether its
request brought much, whether it was the last. A choice of victims takes the leaves (leaves.py), and of those the ones with the
lowest hit density (hit_density.py): the hits to be expected per block and time of a block of that class that has waited so
long. The counts come from hits and from ghosts (ghosts.py): a block that comes back after its eviction is recognised, keeps
its past, and teaches how long it would have had to be kept. ARC (Megiddo and Modha, FAST 2003) and S3-FIFO (Yang et al., SOSP
2023) learn from ghosts, too; but there ghosts move one boundary, and here they draw the whole curve of reuse over age and
class, as hits do in LHD (Beckmann, Chen and Cidon, NSDI 2018). Nothing is set aside for new blocks: where they are worth less
than what is cached, they go first, so that a scan or a cycle pushes out nothing that returns.

Why it loses next to nothing to LRU. The result is watched: lru_shadow.py knows what LRU would have kept in the same room. A hit
that LRU would not have had is credited, and a ghost that LRU would still have is debited. With credit any difference counts, a
little below 0 only a clear one, and where it is used up the least recently used leaf goes (credit.py). (LeCaR, Vietri et al.,
HotStorage 2018, likewise weighs its experts by what each lost.)

Nothing is fitted to a workload: classes are counts, ages are octaves, and weights are those of a few requests and a few
turnovers.

What it costs. A step pays for little more than the stamps of its blocks: events are noted and counted in batches, and victims
are ranked, as many as the steps before took at once, after the reply to a step (`prepare`) or when they run out, because array
operations cost the same for one block as for hundreds. A ranked block that was hit meanwhile stays, and what began to wait or
became a leaf meanwhile gets its place among the ranked ones. No call does work in proportion to the pool: of many leaves a
sample is compared. Hit densities are computed anew every half turnover, in about a millisecond. At most 64 bytes a block: 16
for the tree, 8 each for stamp and prefix hash, 3 for the past, 28 for ghosts.
"""

from typing import NamedTuple

import numpy as np

from ..values.distinct import are_among, distinct
from ..values.types import NO_INT32, NO_INT64, Int32Array, Int64Array
from .block_queue import BlockQueue, Stamps
from .credit import ANY_DIFFERENCE, Credit
from .ghosts import BoolArray, Ghosts, Traces
from .hit_density import FloatArray, HitDensity
from .leaves import Leaves
from .lru_shadow import LruShadow
from .policy import Order, Use
from .use_history import MOST_IN_BATCH, History

_LEAST_LESSON = 256  # blocks between two lessons
_LESSON_SAMPLE = 4096  # waiting blocks and ghosts looked at in a lesson, so that it does not grow with the pool
_SAMPLE = 1024  # leaves looked at in a choice, likewise
_AT_ONCE, _AT_ONCE_LATE = 16, 4  # of so many leaves one is ranked before they are compared anew; more where a step waits
_LEAST_RANKED, _MOST_RANKED = 16, 1024  # victims ranked at once,
_RANKED_SHARE = 32  # about the cache divided by this
_KEPT_OF_MOST = 0.99  # what is left of the most victims of one step after the next one
_FEWER = 4  # times fewer ranked victims will do while what runs is not ranked
_MOST_PENDING = 2048  # blocks whose events are put off
_UNCOUNTED_SHARE = 64  # where blocks are evicted, the cache divided by this is the number of waiting ones that may be unknown
_NEARLY_NONE = 1e-300  # hit density, any multiple of which is a number
NO_KEYS: FloatArray = np.empty(0)


class _Ranked(NamedTuple):
    """Blocks that were waiting leaves, or become leaves when those before them go; with their stamps, the lowest key first."""

    blocks: Int32Array
    stamps: Int64Array
    keys: FloatArray

    def where(self, chosen: BoolArray | slice) -> "_Ranked":
        return _Ranked(self.blocks[chosen], self.stamps[chosen], self.keys[chosen])


class AdaptivePolicy:
    """An EvictionPolicy: the leaf with the lowest hit density goes, or the least recently used one where that is better."""

    wants_uses = True

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._rng = np.random.default_rng(0)
        self._history = History(num_blocks)
        self._stamps = Stamps(num_blocks)
        self._ranked = _Ranked(NO_INT32, NO_INT64, NO_KEYS)  # the next victims
        self._num_ranked = min(_MOST_RANKED, max(_LEAST_RANKED, num_blocks // _RANKED_SHARE))
        self._least_ranked = 1  # what may be left of them before more are ranked
        self._has_ended = False  # whether blocks began to wait since then
        self._most_taken = 0.0  # victims of late, at once
        self._trust = ANY_DIFFERENCE  # in hit densities when they were ranked, see Credit
        self._limit = np.inf  # the hit density from which on the time of the last use ranked them
        self._unused = BlockQueue(self._stamps)  # waiting blocks that no ended sequence had
        self._leaves = Leaves(num_blocks, self._stamps)
        self._ghosts = Ghosts(num_blocks)
        self._hit_density = HitDensity(num_blocks)
        self._lru_shadow = LruShadow(num_blocks)
        self._credit = Credit(num_blocks)
        self._num_waiting = 0
        self._next_lesson = self._lesson_len = max(_LEAST_LESSON, num_blocks // 2)
        self._num_lessons = 0
        self._num_requests = self._num_used = 0
        self._is_full = False  # whether blocks were evicted of late
        # Events that are not counted yet.
        self._new_uses: list[Use] = []
        self._added: list[tuple[Int32Array, Int64Array]] = []  # with their stamps
        self._reused: list[tuple[Traces, int]] = []  # with the time
        self._reused_soon: list[tuple[Int32Array, Int64Array, int]] = []  # before their last use was counted
        self._counted_until = 0
        self._again: list[Int64Array] = []  # stamps of blocks that were computed again
        self._lost: list[Int64Array] = []  # of those that would have been found
        self._evicted: list[tuple[Int32Array, Int64Array]] = []  # with the stamps that they had
        self._removed: list[Int32Array] = []  # of these, what the leaves do not know yet
        self._num_pending = self._num_added = self._num_hit = 0

    def use(self, use: Use) -> None:
        if len(use.blocks):
            self._num_requests += 1
            self._num_used += len(use.blocks)
            if len(use.beside):
                self._wait_anew(use.beside)
            self._new_uses.append(use)
            self._note(len(use.blocks))
            if len(self._new_uses) == MOST_IN_BATCH:
                self._catch_up()

    def _wait_anew(self, beside: Int32Array) -> None:
        """States that a sequence left behind have waited as if no sequence had them. They go before what it still holds."""
        left = distinct(beside[(self._history.turns[beside] == 0) & (self._stamps.newest[beside] > 0)])
        if len(left):
            left = left[np.argsort(self._stamps.newest[left])]
            self._lru_shadow.leave(self._stamps.newest[left])
            self._added.append((left, self._stamps.give(left)))

    def add(self, blocks: Int32Array) -> None:
        if len(blocks):
            self._num_waiting += len(blocks)
            self._num_added += len(blocks)
            self._has_ended = True
            self._added.append((blocks, self._stamps.give(blocks)))
            self._note(len(blocks))

    def hit(self, blocks: Int32Array, *, is_found: bool = True) -> None:
        stamps = self._stamps.newest[blocks]
        if not is_found:
            self._again.append(stamps)
        is_counted = stamps <= self._counted_until
        if np.count_nonzero(is_counted):
            traces = self._history.traces(blocks[is_counted], stamps[is_counted])
            self._reused.append((traces, self._stamps.clock))
        if not is_counted.all():
            self._reused_soon.append((blocks[~is_counted], stamps[~is_counted], self._stamps.clock))
        self._num_hit += len(blocks)
        self._end_wait(blocks)
        self._note(len(blocks))

    def note_cut(self, blocks: Int32Array, num_lost: int) -> None:
        if num_lost:
            stamps = self._stamps.newest[blocks[:num_lost]]
            self._lost.append(stamps[stamps > 0])
            self._note(num_lost)

    def forget_blocks(self, blocks: Int32Array) -> None:
        if len(blocks):
            self._catch_up()
            waited = blocks[self._stamps.newest[blocks] > 0]
            self._lru_shadow.leave(self._stamps.newest[waited])
            self._end_wait(waited)
            self._leaves.remove(blocks)
            self._forget_past(blocks)

    def take_victims(self, count: int) -> Int32Array:
        assert count <= self._num_waiting, "asked for more victims than are evictable"
        self._most_taken = max(count, _KEPT_OF_MOST * self._most_taken)
        victims = [NO_INT32]
        while count > 0:
            if len(unused := self._unused.pop(count)):  # ranking may have found some
                taken = _Ranked(unused, self._stamps.newest[unused], NO_KEYS)
            elif len(self._ranked.blocks):
                taken, self._ranked = self._ranked.where(slice(count)), self._ranked.where(slice(count, None))
                if not (live := self._stamps.are_live(taken.blocks, taken.stamps)).all():
                    taken = taken.where(live)
            else:
                self._rank(count + self._num_ranked, _AT_ONCE_LATE)
                continue
            self._evict(taken.blocks, taken.stamps)
            victims.append(taken.blocks)
            count -= len(taken.blocks)
        return np.concatenate(victims)

    def prepare(self) -> None:
        self._is_full |= bool(self._evicted)
        most_added = self._num_blocks // _UNCOUNTED_SHARE if self._is_full else _MOST_PENDING
        if self._num_added > most_added or 2 * self._num_pending > _MOST_PENDING:
            self._catch_up()
        # What a running sequence holds competes once it ends: until then fewer will do.
        least = min(self._most_taken, self._least_ranked) / (1 if self._has_ended else _FEWER)
        if self._is_full and len(self._ranked.blocks) < least:
            self._rank(self._num_ranked + min(int(self._most_taken), _MOST_RANKED), _AT_ONCE)

    def order(self) -> Order:
        """Blocks that an ended sequence had are in the set of the leaves, or have children."""
        newest = self._stamps.newest
        known = np.concatenate([self._leaves.entries(), self._leaves.num_children.nonzero()[0].astype(np.int32)])
        known = known[(newest[known] <= self._counted_until) & (self._history.turns[known] > 0)]
        return Order(self._stamps, [*self._unused.rows(), (known, newest[known]), *self._added], self._stamps.clock)

    @property
    def _request_len(self) -> float:
        """Blocks of an average sequence; 1 before any was released while it ran."""
        return max(self._num_used, 1) / max(self._num_requests, 1)

    def _evict(self, blocks: Int32Array, stamps: Int64Array) -> None:
        if len(blocks):
            self._evicted.append((blocks, stamps))
            self._removed.append(blocks)
            self._end_wait(blocks)

    def _end_wait(self, blocks: Int32Array) -> None:
        self._stamps.end_waits(blocks)
        self._num_waiting -= len(blocks)

    def _note(self, count: int) -> None:
        """The events of count more blocks were put off; a bounded number may be."""
        self._num_pending += count
        if self._num_pending > _MOST_PENDING:
            self._catch_up()

    # Counting events

    def _catch_up(self) -> None:
        """Counts the events that were put off. Events that depend on each other are counted in the order of their time."""
        now = self._stamps.clock
        num_used, self._is_full = sum(len(use.blocks) for use in self._new_uses), bool(self._evicted)
        bared = self._settle()
        bared = bared[self._stamps.newest[bared] <= self._counted_until]  # the others were added
        if self._evicted:
            self._make_ghosts(now)
        num_lost = self._record_uses(now) if self._new_uses else 0
        self._counted_until = now
        added = self._queue_added() if self._added else NO_INT32
        if len(self._ranked.blocks):
            self._merge(np.concatenate([bared, added]) if self._trust else bared)
        self._reused += [(self._history.traces(blocks, stamps), then) for blocks, stamps, then in self._reused_soon]
        self._reused_soon = []
        num_gained = num_kept = 0
        if self._lost:
            num_lost += int(np.count_nonzero(self._lru_shadow.has(np.concatenate(self._lost))))
            self._lost = []
        if self._again:  # it is reuse, but no hit of anything
            has_lru = self._lru_shadow.has(np.concatenate(self._again))
            num_kept, num_gained = -int(np.count_nonzero(has_lru)), -int(np.count_nonzero(~has_lru))
            self._num_hit, self._again = self._num_hit - len(has_lru), []
        if self._reused:
            for traces, then in self._reused:
                self._hit_density.saw_reuse(traces, then)
            kept = self._lru_shadow.leave(np.concatenate([traces.stamps for traces, _ in self._reused]))
            num_kept += int(np.count_nonzero(kept))
            num_gained += int(np.count_nonzero(~kept))
            self._reused = []
        self._lru_shadow.shrink(self._num_waiting)
        self._credit.count(num_used, self._num_hit, num_kept + num_lost, num_gained - num_lost)
        self._num_pending = self._num_added = self._num_hit = 0
        if now >= self._next_lesson:
            self._learn()
        if self._trust != self._new_trust():
            self._forget_ranks()

    def _make_ghosts(self, now: int) -> None:
        victims = np.concatenate([blocks for blocks, _ in self._evicted])
        stamps = np.concatenate([stamps for _, stamps in self._evicted])
        self._evicted = []
        self._lru_shadow.note_evicted(stamps)
        known = (self._history.turns[victims] > 0) & ~self._history.are_beside[victims]
        traces = self._history.traces(victims[known], stamps[known])
        lost = self._ghosts.remember(self._history.hashes[victims[known]], traces, now)
        self._hit_density.lost_sight(lost, now, self._ghosts.every)
        self._forget_past(victims)

    def _record_uses(self, now: int) -> int:
        """Returns the number of blocks that came back after their eviction and that LRU would still have."""
        uses, self._new_uses = self._new_uses, []
        found = self._history.record(uses, self._ghosts, now)
        self._hit_density.saw_reuse(found, now, self._ghosts.every)
        parents = [part for use in uses for part in (use.blocks[:-1], use.above)]
        self._leaves.link(
            np.concatenate(parents), np.concatenate([part for use in uses for part in (use.blocks[1:], use.beside)])
        )
        return self._lru_shadow.leave_ghosts(found.stamps, self._ghosts.every)

    def _queue_added(self) -> Int32Array:
        """Returns those of the added blocks that wait and that ended sequences had."""
        blocks = np.concatenate([blocks for blocks, _ in self._added])
        stamps = np.concatenate([stamps for _, stamps in self._added])
        self._added = []
        self._lru_shadow.enter(stamps)
        live = self._stamps.are_live(blocks, stamps)
        blocks, stamps = blocks[live], stamps[live]
        is_used = self._history.turns[blocks] > 0
        self._unused.push(blocks[~is_used], stamps[~is_used])
        self._leaves.add(blocks[is_used])
        self._unused.shrink_to(0 if is_used.all() else self._num_waiting)
        return blocks[is_used]

    def _learn(self) -> None:
        now = self._stamps.clock
        every = -(-self._num_blocks // _LESSON_SAMPLE)
        first = self._num_lessons % every
        stamps = self._stamps.newest[first::every]
        waits = (stamps > 0).nonzero()[0]
        cached = self._history.traces((waits * every + first).astype(np.int32), stamps[waits])
        ghosts = self._ghosts.sample(first, every, now)
        self._hit_density.learn([(cached, every), (ghosts, every * self._ghosts.every)], now, self._request_len)
        self._num_lessons += 1
        self._next_lesson = now + self._lesson_len
        self._forget_ranks()

    def _forget_past(self, blocks: Int32Array) -> None:
        self._history.forget_blocks(blocks)
        self._leaves.forget_blocks(blocks)

    # Choosing victims

    def _new_trust(self) -> float:
        return self._credit.trust(self._lru_shadow.num_missing, self._request_len)

    def _forget_ranks(self) -> None:
        self._ranked = self._ranked.where(slice(0))

    def _settle(self) -> Int32Array:
        """The parents of what was evicted may be leaves now. Returns those that are."""
        removed, self._removed = self._removed, []
        return self._leaves.remove(np.concatenate(removed)) if removed else NO_INT32

    def _rank(self, count: int, at_once: int) -> None:
        """Ranks 1 victim or more, and up to count; of so many leaves one."""
        self._settle()
        leaves = self._leaves.sample(_SAMPLE, self._counted_until, self._rng)
        if not len(leaves) and self._num_pending:
            self._catch_up()
            leaves = self._leaves.sample(_SAMPLE, self._counted_until, self._rng)
        self._trust, self._limit = self._new_trust(), np.inf
        stamps = self._stamps.newest[leaves]
        keys = self._keys(leaves)
        if self._trust and len(leaves):
            self._limit = self._trust * max(keys[np.argmin(stamps)], _NEARLY_NONE)
            keys = np.minimum(keys, self._limit)
        order = np.lexsort((stamps, keys))[: max(1, len(leaves) // at_once)]
        blocks, keys = self._with_parents(leaves[order], keys[order], count)
        if not len(blocks):  # children are in use, or move: their parents wait alone under retention only
            waiting = self._stamps.newest.nonzero()[0].astype(np.int32)
            blocks = waiting[np.argsort(self._stamps.newest[waiting])[:count]]
            keys = np.full(len(blocks), -np.inf)
        self._ranked = _Ranked(blocks, self._stamps.newest[blocks], keys)
        self._least_ranked, self._has_ended = max(1, len(blocks) // 2), False

    def _merge(self, blocks: Int32Array) -> None:
        """Gives those of these waiting blocks their place that are leaves and go before the last ranked one."""
        ranked = self._ranked.where(self._stamps.are_live(self._ranked.blocks, self._ranked.stamps))
        leaves = self._leaves.among(blocks)
        keys = self._keys(leaves)
        chosen = keys < self._ranked.keys[-1]
        if np.count_nonzero(chosen):
            chosen &= ~are_among(leaves, ranked.blocks)
            blocks, keys = self._with_parents(leaves[chosen], keys[chosen], self._num_ranked)
            keys = np.concatenate([ranked.keys, keys])
            blocks = np.concatenate([ranked.blocks, blocks])
            stamps = self._stamps.newest[blocks]
            order = np.argsort(keys, kind="stable")[: max(self._num_ranked, len(ranked.blocks))]
            self._ranked = _Ranked(blocks[order], stamps[order], keys[order])

    def _keys(self, leaves: Int32Array) -> FloatArray:
        """[n] the lowest goes first; among equals, the least recently used one."""
        if not self._trust:
            return self._stamps.newest[leaves].astype(np.float64)
        return np.minimum(self._densities(leaves), self._limit)

    def _densities(self, blocks: Int32Array) -> FloatArray:
        return self._hit_density.of(self._history.traces(blocks, self._stamps.newest[blocks]), self._stamps.clock)

    def _with_parents(self, leaves: Int32Array, keys: FloatArray, count: int) -> tuple[Int32Array, FloatArray]:
        """At most count blocks: these leaves, each with the blocks above it that wait as long or longer, are like it, and have
        no child that does not go before. With the keys of the leaves."""
        # Single numbers are read from a memoryview in a third of the time that an array takes.
        newest, classes = self._stamps.newest.data, self._history.classes.data
        parents, num_children = self._leaves.parents.data, self._leaves.num_children.data
        until = self._counted_until  # what waits since later gets its place once it is counted
        chosen: list[int] = []
        lens: list[int] = []
        left: dict[int, int] = {}  # by block, its children that are not chosen yet
        for block in leaves.tolist():
            before = len(chosen)
            while len(chosen) < count:
                chosen.append(block)
                parent, since, kind = parents[block], newest[block] + 1, classes[block]
                is_alike = (classes[parent] == kind or not self._trust) and 0 < newest[parent] <= min(since, until)
                num_left = left.get(parent, num_children[parent])
                left[parent] = num_left - 1
                if not parent or num_left != 1 or not is_alike:
                    break
                block = parent
            lens.append(len(chosen) - before)
        return np.array(chosen, np.int32), np.repeat(keys, lens)
