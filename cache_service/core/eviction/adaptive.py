"""Keeps the blocks that are likely to be used again, as far as the past tells; else evicts in least recently used order.

Most cached prompts are never seen again, and a queue that is emptied in the order of use spends nearly all of a small cache on
them: each waits as long as a block that ten requests shared, and both are evicted before their next use. What tells the two
apart is not known beforehand (how long until a conversation goes on, how many documents are read twice), so it is learned.

How it works. Blocks wait in one queue per number of uses. A choice of victims compares only the heads of the queues, by their
hit density (hit_density.py): the hits to be expected per block and time of a block with that number of uses and that wait. The
counts come from hits and from ghosts (ghosts.py): a block that comes back after its eviction is recognised, keeps the uses that
it had, and teaches how long it would have had to be kept. ARC (Megiddo and Modha, FAST 2003) and S3-FIFO (Yang et al., SOSP
2023) learn from ghosts, too; but there ghosts move one boundary, and here they draw the whole curve of reuse over age and uses,
as hits do in LHD (Beckmann, Chen and Cidon, NSDI 2018). New blocks have no fixed share of the cache: their hit density decides.

Why it is not worse than LRU where LRU is right. If reuse depends on nothing but the time since the last one, all classes have
the same hit density at the same age, and less with age. Then comparing hit densities is comparing ages, but for the noise of
the counts. So the least recently used block goes, unless the hit density of another is less than 0.4 of its own: a false alarm
costs hits, and a real difference between what returns and what does not is a multiple. (LeCaR, Vietri et al., HotStorage 2018,
likewise overrules its expert LRU on evidence only.) A change of the workload shows in the counts, because blocks that wait in
vain count as seen for that long without a reuse. The result is watched, too: lru_shadow.py knows what LRU would have kept in
the same room. Hits that LRU would not have had are set against ghosts that LRU would still have, and while LRU was better of
late, its order is taken.

Leaves before parents. A sequence uses all blocks above one that it uses, so a parent has at least the uses of a child
(use_history.py keeps that true also where a ghost knew more), and was used no earlier. More uses never have a lower hit
density, more age never has a higher one, and among equals the fewest uses go first, then the oldest. So a child is always
before its parent, compared by hit density as by age.

Nothing is fitted to a workload: classes are counts, ages are octaves, and weights are those of a few requests and a few
turnovers.

What it costs. A step pays for little more than the stamps of its blocks: victims are chosen hundreds ahead, and events are
noted and counted in batches, after a step was answered (`prepare`) or when victims run out, because array operations cost the
same for one block as for hundreds. So the counts are up to a sixty-fourth of the cache behind, which makes no difference to a
curve over octaves of turnovers. No call does work in proportion to the pool; hit densities are computed anew every half
turnover, in about a millisecond. About 55 bytes a block: up to 24 in queues, 16 for 4 ghosts, 8 each for stamp and prefix hash,
1 for the uses.
"""

from typing import NamedTuple

import numpy as np

from ..values.types import NO_INT32, NO_INT64, Int32Array, Int64Array
from .block_queue import BlockQueue, Stamps, Sweeper
from .ghosts import Ghosts, Traces
from .hit_density import NUM_CLASSES, HitDensity, age_idx, first_age
from .lru_shadow import LruShadow
from .policy import Use
from .use_history import History

_GHOSTS_PER_BLOCK = 4
_OVERRULES_BELOW = 0.4  # of the hit density of the least recently used block
_ALLOWED_LOSS = 2  # hits behind LRU, in blocks of an average request, before its order is taken
_GAIN_SPAN = 1  # turnovers of the cache over which gain and loss are remembered
_LEAST_LESSON = 256  # blocks between two lessons
_SAMPLE = 4096  # waiting blocks looked at in a lesson, so that it does not grow with the pool
_MOST_AHEAD = 512  # victims chosen ahead, because choosing a few costs as much as choosing many,
_AHEAD_SHARE = 64  # but no more than the cache divided by this
_MOST_PENDING = 2048  # blocks whose events are put off


class _Head(NamedTuple):
    """The block of a class that has waited longest."""

    hit_density: float
    row: int
    stamp: int


class AdaptivePolicy:
    """An EvictionPolicy that evicts the lowest hit density first, or in LRU order while that was better of late."""

    wants_uses = True

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._history = History(num_blocks, NUM_CLASSES)
        self._stamps = Stamps(num_blocks)
        self._queues = [BlockQueue(self._stamps) for _ in range(NUM_CLASSES)]
        self._sweeper = Sweeper()
        self._chosen: Int32Array = NO_INT32  # the next victims, in order, with their stamps
        self._chosen_stamps: Int64Array = NO_INT64
        self._num_ahead = min(_MOST_AHEAD, num_blocks // _AHEAD_SHARE)
        self._ghosts = Ghosts(num_blocks, _GHOSTS_PER_BLOCK * num_blocks)
        self._hit_density = HitDensity()
        self._lru_shadow = LruShadow(num_blocks)
        self._num_waiting = 0
        self._gain = 0.0  # recent hits, minus those that LRU would have had
        self._next_lesson = self._lesson_len = max(_LEAST_LESSON, num_blocks // 2)
        self._num_lessons = 0
        self._num_requests = self._num_used = 0
        # Events that are not counted yet.
        self._new_uses: list[Use] = []
        self._added: list[tuple[Int32Array, Int64Array]] = []  # with their stamps
        self._reused: list[tuple[Traces, int]] = []  # with the time
        self._evicted: list[tuple[Int32Array, Int64Array]] = []  # with the stamps that they had
        self._num_pending = 0

    def use(self, use: Use) -> None:
        if len(use.blocks):
            self._num_requests += 1
            self._num_used += len(use.blocks)
            self._new_uses.append(Use(use.blocks.copy(), use.tokens.copy(), use.root, use.priority, use.num_blocks))
            self._note(len(use.blocks))
            if len(self._new_uses) == self._history.most_in_batch:
                self._catch_up()

    def add(self, blocks: Int32Array) -> None:
        if len(blocks):
            self._num_waiting += len(blocks)
            self._added.append((blocks, self._stamps.give(blocks)))
            self._note(len(blocks))

    def hit(self, blocks: Int32Array) -> None:
        traces = Traces(self._history.uses[blocks], self._stamps.newest[blocks])
        self._reused.append((traces, self._stamps.clock))
        self._end_wait(blocks)
        self._note(len(blocks))

    def forget_blocks(self, blocks: Int32Array) -> None:
        if len(blocks):
            self._catch_up()
            waited = blocks[self._stamps.newest[blocks] > 0]
            self._lru_shadow.leave(self._stamps.newest[waited])
            self._end_wait(waited)
            self._history.forget_blocks(blocks)

    def take_victims(self, count: int) -> Int32Array:
        victims, stamps = self._chosen[:count], self._chosen_stamps[:count]
        if len(victims) < count or np.count_nonzero(self._stamps.newest[victims] != stamps):
            self._choose(count)
            victims, stamps = self._chosen[:count], self._chosen_stamps[:count]
            assert len(victims) == count, "asked for more victims than are evictable"
        self._chosen, self._chosen_stamps = self._chosen[count:], self._chosen_stamps[count:]
        self._evicted.append((victims, stamps))
        self._end_wait(victims)
        return victims

    def prepare(self) -> None:
        if self._evicted and 2 * len(self._chosen) < self._num_ahead:
            self._choose(0)
        elif 2 * self._num_pending > _MOST_PENDING:
            self._catch_up()

    def waiting(self) -> Int32Array:
        rows = [self._chosen[self._stamps.are_live(self._chosen, self._chosen_stamps)]]
        rows += [queue.live() for queue in self._queues]
        rows += [blocks[self._stamps.are_live(blocks, stamps)] for blocks, stamps in self._added]
        return np.concatenate(rows)

    @property
    def _request_len(self) -> float:
        """Blocks of an average sequence; 1 before any was released while it ran."""
        return max(self._num_used, 1) / max(self._num_requests, 1)

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
        if self._evicted:
            self._make_ghosts(now)
        if self._new_uses:
            found = self._history.record(self._new_uses, self._ghosts, now)
            self._new_uses = []
            self._hit_density.saw_reuse(found, now)
            self._gain -= np.count_nonzero(self._lru_shadow.leave(found.stamps[found.uses > 0]))
        if self._added:
            self._queue_added(now)
        if self._reused:
            for traces, then in self._reused:
                self._hit_density.saw_reuse(traces, then)
            stamps = np.concatenate([traces.stamps for traces, _ in self._reused])
            self._gain += np.count_nonzero(~self._lru_shadow.leave(stamps))
            self._reused = []
        self._lru_shadow.shrink(self._num_waiting)
        self._num_pending = 0
        if now >= self._next_lesson:
            self._learn()

    def _make_ghosts(self, now: int) -> None:
        victims = np.concatenate([blocks for blocks, _ in self._evicted])
        stamps = np.concatenate([stamps for _, stamps in self._evicted])
        self._evicted = []
        uses = self._history.uses[victims]
        known = uses > 0
        lost = self._ghosts.remember(self._history.hashes[victims[known]], uses[known], stamps[known], now)
        self._hit_density.lost_sight(lost, now)
        self._history.forget_blocks(victims)

    def _queue_added(self, now: int) -> None:
        blocks = np.concatenate([blocks for blocks, _ in self._added])
        stamps = np.concatenate([stamps for _, stamps in self._added])
        self._added = []
        self._lru_shadow.enter(stamps)
        self._gain *= max(0, 1 - len(blocks) / (_GAIN_SPAN * self._num_blocks))
        live = self._stamps.are_live(blocks, stamps)
        blocks, stamps = blocks[live], stamps[live]
        classes = np.maximum(self._history.uses[blocks], 1)
        for row in set(classes.tolist()):
            same = classes == row
            self._queues[row - 1].push(blocks[same], stamps[same])
        self._sweeper.pay(len(blocks), self._queues)

    def _learn(self) -> None:
        now = self._stamps.clock
        every = -(-self._num_blocks // _SAMPLE)
        first = self._num_lessons % every
        stamps = self._stamps.newest[first::every]
        waits = stamps > 0
        cached = Traces(self._history.uses[first::every][waits], stamps[waits])
        ghosts = self._ghosts.sample(first, every, now)
        self._hit_density.learn([(cached, every), (ghosts, every)], now, self._request_len)
        self._num_lessons += 1
        self._next_lesson = now + self._lesson_len

    # Choosing victims

    def _choose(self, count: int) -> None:
        """Chooses count victims, and more ahead: first the live ones that were chosen before, then the next."""
        self._catch_up()
        live = self._stamps.are_live(self._chosen, self._chosen_stamps)
        chosen = [self._chosen[live]]
        count += self._num_ahead - len(chosen[0])
        heads = [queue.oldest() for queue in self._queues]
        while count > 0 and (choice := self._lowest(heads)) is not None:
            row, until = choice
            chosen.append(self._queues[row].pop(count, until))
            count -= len(chosen[-1])
            heads[row] = self._queues[row].oldest()
        self._chosen = np.concatenate(chosen)
        self._chosen_stamps = self._stamps.newest[self._chosen]

    def _lowest(self, heads: list[int | None]) -> tuple[int, int] | None:
        """The class whose head goes next, and the last stamp up to which its blocks follow without another comparison."""
        now = self._stamps.clock
        present = [
            _Head(self._hit_density.table[row][age_idx(now - stamp)], row, stamp)
            for row, stamp in enumerate(heads)
            if stamp is not None
        ]
        if not present:
            return None
        lowest = min(present)  # the fewest uses among equals
        oldest = min(present, key=lambda head: head.stamp)
        may_overrule = self._gain >= -_ALLOWED_LOSS * self._request_len
        if may_overrule and lowest.hit_density < _OVERRULES_BELOW * oldest.hit_density:
            head, until = lowest, now
        else:
            head, until = oldest, min((other.stamp for other in present if other is not oldest), default=now)
        same_age = now - first_age(age_idx(now - head.stamp))
        return head.row, max(head.stamp, min(until, same_age))
