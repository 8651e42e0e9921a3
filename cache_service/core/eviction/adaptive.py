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

Why it is not worse than LRU where LRU is right. The result is watched: lru_shadow.py knows what LRU would have kept in the
same room. Hits that LRU would not have had are set against ghosts that LRU would still have. The least recently used block
goes, unless the hit density of another is less than 0.4 of its own: a false alarm costs hits, and a real difference between
what returns and what does not is a multiple. Where this has won much, any difference counts. Where it has lost, of late or in
all, the order of LRU is taken. (LeCaR, Vietri et al., HotStorage 2018, likewise weighs its experts by what each lost.)

Nothing is fitted to a workload: classes are counts, ages are octaves, and weights are those of a few requests and a few
turnovers.

What it costs. A step pays for little more than the stamps of its blocks: victims are chosen hundreds ahead, and events are
noted and counted in batches, after the reply to a step (`prepare`) or when victims run out, because array operations cost the
same for one block as for hundreds. No call does work in proportion to the pool: of many leaves a sample is compared. Hit
densities are computed anew every half turnover, in about a millisecond. About 75 bytes a block: up to 24 in the queue, 17 for
the tree, 8 each for stamp and prefix hash, 3 for the past, 16 for ghosts; 128 for ghosts in a pool of less than 65,536 blocks.
"""

import numpy as np

from ..values.types import NO_INT32, NO_INT64, Int32Array, Int64Array
from .block_queue import BlockQueue, Stamps, Sweeper
from .ghosts import Ghosts, Traces
from .hit_density import FloatArray, HitDensity
from .leaves import Leaves
from .lru_shadow import LruShadow
from .policy import Order, Use
from .use_history import MOST_IN_BATCH, History

_OVERRULES_BELOW = 0.4  # of the hit density of the least recently used block
_TRUSTED = 1e9  # the same, so any difference, while recent gains exceed some requests and all gains a share of the blocks used:
_TRUSTED_REQUESTS, _TRUSTED_SHARE = 2, 0.005
_ALLOWED_LOSS = 2  # recent hits behind LRU, in blocks of an average request, before its order is taken;
_ALLOWED_REQUESTS, _ALLOWED_SHARE = 2, 0.0003  # and of all time, in such requests and as a share of the blocks used
_GAIN_SPAN = 1  # turnovers of the cache over which recent gain and loss are remembered
_LEAST_LESSON = 256  # blocks between two lessons
_SAMPLE = 4096  # waiting blocks looked at in a lesson and leaves at a choice, so that it does not grow with the pool
_MOST_AHEAD = 4096  # victims chosen ahead, because choosing a few costs as much as choosing many,
_AHEAD_SHARE = 64  # but no more than the cache divided by this,
_MOST_PREPARED = 512  # and so many of them between two steps
_AT_ONCE = 8  # of so many leaves one is chosen before they are compared anew
_LEAST_LRU_RUN = 16  # blocks chosen in the order of LRU before others are compared anew,
_LRU_RUN_SHARE = 256  # or the cache divided by this
_MOST_PENDING = 2048  # blocks whose events are put off


class AdaptivePolicy:
    """An EvictionPolicy that evicts the lowest hit density first, or in LRU order while that was better of late."""

    wants_uses = True

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._rng = np.random.default_rng(0)
        self._history = History(num_blocks)
        self._stamps = Stamps(num_blocks)
        self._order = BlockQueue(self._stamps)  # all waiting blocks, least recently used first
        self._unused = BlockQueue(self._stamps)  # those that no ended sequence had
        self._sweeper = Sweeper()
        self._leaves = Leaves(num_blocks, self._stamps)
        self._chosen: Int32Array = NO_INT32  # the next victims, in order, with their stamps
        self._chosen_stamps: Int64Array = NO_INT64
        self._lru_run = max(_LEAST_LRU_RUN, num_blocks // _LRU_RUN_SHARE)
        self._is_short = False  # of victims chosen ahead
        self._num_ahead = min(_MOST_AHEAD, num_blocks // _AHEAD_SHARE)
        self._ghosts = Ghosts(num_blocks)
        self._hit_density = HitDensity(num_blocks)
        self._lru_shadow = LruShadow(num_blocks)
        self._num_waiting = 0
        self._gain = 0.0  # recent hits, minus those that LRU would have had
        self._total_gain = 0  # the same of all time
        self._next_lesson = self._lesson_len = max(_LEAST_LESSON, num_blocks // 2)
        self._num_lessons = 0
        self._num_requests = self._num_used = 0
        # Events that are not counted yet.
        self._new_uses: list[Use] = []
        self._added: list[tuple[Int32Array, Int64Array]] = []  # with their stamps
        self._reused: list[tuple[Traces, int]] = []  # with the time
        self._reused_soon: list[tuple[Int32Array, Int64Array, int]] = []  # before their last use was counted
        self._counted_until = 0
        self._evicted: list[tuple[Int32Array, Int64Array]] = []  # with the stamps that they had
        self._num_pending = 0

    def use(self, use: Use) -> None:
        if len(use.blocks):
            self._num_requests += 1
            self._num_used += len(use.blocks)
            self._new_uses.append(Use(use.blocks.copy(), use.tokens.copy(), use.root, use.priority, use.num_blocks))
            self._note(len(use.blocks))
            if len(self._new_uses) == MOST_IN_BATCH:
                self._catch_up()

    def add(self, blocks: Int32Array) -> None:
        if len(blocks):
            self._num_waiting += len(blocks)
            self._added.append((blocks, self._stamps.give(blocks)))
            self._note(len(blocks))

    def hit(self, blocks: Int32Array) -> None:
        stamps = self._stamps.newest[blocks]
        is_counted = stamps <= self._counted_until
        if np.count_nonzero(is_counted):
            traces = self._history.traces(blocks[is_counted], stamps[is_counted])
            self._reused.append((traces, self._stamps.clock))
        if not is_counted.all():
            self._reused_soon.append((blocks[~is_counted], stamps[~is_counted], self._stamps.clock))
        self._end_wait(blocks)
        self._note(len(blocks))

    def forget_blocks(self, blocks: Int32Array) -> None:
        if len(blocks):
            self._catch_up()
            waited = blocks[self._stamps.newest[blocks] > 0]
            self._lru_shadow.leave(self._stamps.newest[waited])
            self._end_wait(waited)
            self._leaves.remove(blocks[~self._leaves.is_removed[blocks]])
            self._forget_past(blocks)

    def take_victims(self, count: int) -> Int32Array:
        self._unchoose()
        if len(self._chosen) < count:
            self._choose(count + min(self._num_ahead, _MOST_PREPARED))
            assert len(self._chosen) >= count, "asked for more victims than are evictable"
        victims, stamps = self._chosen[:count], self._chosen_stamps[:count]
        self._chosen, self._chosen_stamps = self._chosen[count:], self._chosen_stamps[count:]
        self._is_short = 2 * len(self._chosen) < self._num_ahead
        self._evicted.append((victims, stamps))
        self._end_wait(victims)
        return victims

    def prepare(self) -> None:
        if self._is_short:
            self._choose(min(self._num_ahead, len(self._chosen) + _MOST_PREPARED))
            self._is_short = 0 < len(self._chosen) < min(self._num_ahead, self._num_waiting)
        elif 2 * self._num_pending > _MOST_PENDING:
            self._catch_up()

    def order(self) -> Order:
        chosen = self._chosen[self._stamps.are_live(self._chosen, self._chosen_stamps)]
        return Order(self._stamps, [*self._order.rows(), *self._added], self._stamps.clock, chosen)

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
        self._unchoose()
        if self._new_uses:
            self._record_uses(now)
        if self._added:
            self._queue_added()
        self._counted_until = now
        self._reused += [(self._history.traces(blocks, stamps), then) for blocks, stamps, then in self._reused_soon]
        self._reused_soon = []
        if self._reused:
            for traces, then in self._reused:
                self._hit_density.saw_reuse(traces, then)
            stamps = np.concatenate([traces.stamps for traces, _ in self._reused])
            self._count_gain(int(np.count_nonzero(~self._lru_shadow.leave(stamps))))
            self._reused = []
        self._lru_shadow.shrink(self._num_waiting)
        self._num_pending = 0
        if now >= self._next_lesson:
            self._learn()

    def _count_gain(self, gain: int) -> None:
        self._gain += gain
        self._total_gain += gain

    def _trust(self) -> float:
        """The share of the hit density of the least recently used block below which another one goes before it; 0 for LRU."""
        request_len, num_used = self._request_len, self._num_used
        has_lost = self._total_gain < -(_ALLOWED_REQUESTS * request_len + _ALLOWED_SHARE * num_used)
        if has_lost or self._gain < -_ALLOWED_LOSS * request_len:
            return 0
        has_won = self._gain > _TRUSTED_REQUESTS * request_len and self._total_gain > _TRUSTED_SHARE * num_used
        return _TRUSTED if has_won else _OVERRULES_BELOW

    def _make_ghosts(self, now: int) -> None:
        victims = np.concatenate([blocks for blocks, _ in self._evicted])
        stamps = np.concatenate([stamps for _, stamps in self._evicted])
        self._evicted = []
        known = self._history.turns[victims] > 0
        traces = self._history.traces(victims[known], stamps[known])
        lost = self._ghosts.remember(self._history.hashes[victims[known]], traces, now)
        self._hit_density.lost_sight(lost, now, self._ghosts.every)
        self._forget_past(victims)

    def _unchoose(self) -> None:
        """Chosen blocks that were hit stay."""
        if not len(self._chosen):
            return
        live = self._stamps.are_live(self._chosen, self._chosen_stamps)
        spared = self._chosen[~live]
        if len(spared):
            spared = spared[self._leaves.is_removed[spared]]
            self._leaves.restore(spared)
            self._chosen, self._chosen_stamps = self._chosen[live], self._chosen_stamps[live]

    def _record_uses(self, now: int) -> None:
        uses, self._new_uses = self._new_uses, []
        found = self._history.record(uses, self._ghosts, now)
        self._hit_density.saw_reuse(found, now, self._ghosts.every)
        self._count_gain(-self._ghosts.every * int(np.count_nonzero(self._lru_shadow.leave(found.stamps))))
        self._leaves.link(np.concatenate([use.blocks[:-1] for use in uses]), np.concatenate([use.blocks[1:] for use in uses]))

    def _queue_added(self) -> None:
        blocks = np.concatenate([blocks for blocks, _ in self._added])
        stamps = np.concatenate([stamps for _, stamps in self._added])
        self._added = []
        self._lru_shadow.enter(stamps)
        self._gain *= max(0, 1 - len(blocks) / (_GAIN_SPAN * self._num_blocks))
        live = self._stamps.are_live(blocks, stamps)
        blocks, stamps = blocks[live], stamps[live]
        self._order.push(blocks, stamps)
        is_used = self._history.turns[blocks] > 0
        self._unused.push(blocks[~is_used], stamps[~is_used])
        self._leaves.add(blocks[is_used])
        self._sweeper.pay(len(blocks), [self._order, self._unused])

    def _learn(self) -> None:
        now = self._stamps.clock
        every = -(-self._num_blocks // _SAMPLE)
        first = self._num_lessons % every
        stamps = self._stamps.newest[first::every]
        waits = (stamps > 0).nonzero()[0]
        cached = self._history.traces((waits * every + first).astype(np.int32), stamps[waits])
        ghosts = self._ghosts.sample(first, every, now)
        self._hit_density.learn([(cached, every), (ghosts, every * self._ghosts.every)], now, self._request_len)
        self._num_lessons += 1
        self._next_lesson = now + self._lesson_len

    def _forget_past(self, blocks: Int32Array) -> None:
        self._history.forget_blocks(blocks)
        self._leaves.forget_blocks(blocks)

    # Choosing victims

    def _choose(self, count: int) -> None:
        """Chooses victims up to count: first the live ones that were chosen before, then the next."""
        self._catch_up()
        chosen, count = [self._chosen], count - len(self._chosen)
        while count > 0 and len(blocks := self._next(count)):
            chosen.append(blocks)
            count -= len(blocks)
        self._chosen = np.concatenate(chosen)
        self._chosen_stamps = self._stamps.newest[self._chosen]

    def _next(self, count: int) -> Int32Array:
        """At most count of the next victims; none only if none is left."""
        if len(blocks := self._pop(self._unused, count)):
            return self._remove(blocks)
        if (trust := self._trust()) > 0 and (oldest := self._oldest()) is not None:
            limit = trust * self._densities(np.array([oldest], np.int32))[0]
            leaves = self._leaves.sample(_SAMPLE, self._rng)
            densities = self._densities(leaves)
            rows = (densities < limit).nonzero()[0]
            if len(rows):
                order = np.lexsort((self._stamps.newest[leaves[rows]], densities[rows]))
                lowest = leaves[rows[order[: max(1, len(leaves) // _AT_ONCE)]]]
                return self._remove(self._with_parents(lowest, count))
        return self._remove(self._pop(self._order, min(count, self._lru_run)))

    def _pop(self, queue: BlockQueue, count: int) -> Int32Array:
        """At most count blocks of a queue that were not chosen yet; none only if it is empty."""
        while len(blocks := queue.pop(count)):
            if len(left := blocks[~self._leaves.is_removed[blocks]]):
                return left
        return NO_INT32

    def _oldest(self) -> int | None:
        """The least recently used block that was not chosen yet."""
        while (block := self._order.first()) is not None:
            if not self._leaves.is_removed[block]:
                return block
            self._order.pop(1)
        return None

    def _densities(self, blocks: Int32Array) -> FloatArray:
        return self._hit_density.of(self._history.traces(blocks, self._stamps.newest[blocks]), self._stamps.clock)

    def _remove(self, blocks: Int32Array) -> Int32Array:
        self._leaves.remove(blocks)
        return blocks

    def _with_parents(self, leaves: Int32Array, count: int) -> Int32Array:
        """At most count blocks: these leaves, each with the blocks above it that wait as long, are like it and have no other
        child."""
        newest, classes = self._stamps.newest, self._history.classes
        parents, num_children = self._leaves.parents, self._leaves.num_children
        chosen: list[int] = []
        for block in leaves.tolist():
            while len(chosen) < count:
                chosen.append(block)
                parent = int(parents[block])
                is_alike = classes[parent] == classes[block] and newest[parent] == newest[block] + 1
                if not parent or num_children[parent] > 1 or not is_alike:
                    break
                block = parent
        return np.array(chosen, np.int32)
