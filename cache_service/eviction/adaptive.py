"""Keeps what is likely to be used again, as far as the past tells; the least recently used order where it does not.

Most cached prompts are never seen again, and a queue that is emptied in the order of use spends nearly all of a small
cache on them: each waits as long as a block that ten requests shared, and the next use of either comes when it is gone.
What tells the two apart is not known beforehand (how long until a conversation goes on, how many documents are read
twice), so it is learned.

How it works. Blocks wait in one queue per number of uses. When room is wanted, only the heads of the queues are compared:
by their worth (worth.py), the hits to be expected per block and time of what was used so often and has waited so long.
The counts come from hits and from ghosts (ghosts.py): a block that comes back after its eviction is recognised, goes on
with the uses that it had, and teaches how long it would have had to be kept. Ghosts do that in ARC (Megiddo and Modha,
FAST 2003) and S3-FIFO (Yang et al., SOSP 2023), too; but there they move one boundary, and here they draw the whole curve
of reuse over age and uses, as hits do in LHD (Beckmann, Chen and Cidon, NSDI 2018). New blocks have no fixed share of the
cache: they get what they are worth.

Why it is not worse than LRU where LRU is right. If reuse depends on nothing but the time since the last one, all classes
are worth the same at the same age, less with age, and comparing worth is comparing ages, but for the noise of the counts.
So the least recently used block goes, unless another is worth less than half of it: a false alarm costs hits, and a real
difference between what returns and what does not is a multiple. (LeCaR, Vietri et al., HotStorage 2018, likewise
overrules its expert LRU on evidence only.) A change of the workload shows in the counts, because blocks that wait in vain
count as seen for so long without a reuse. And the result is watched: what LRU would have kept in the same room is known
(shadow.py), so hits that it would not have had and ghosts that it would still have are set against each other, and while
LRU was better of late, its order is taken.

Leaves before parents. A sequence uses all blocks above one that it uses, so a parent has at least the uses of a child
(`use` sees to that also where a ghost knew more), and was used no earlier. More uses are never worth less, more age is
never worth more, and among equals the fewest uses go first, then the oldest. So a child is always before its parent,
compared by worth as by age.

Nothing is fitted to a workload: classes are counts, ages are octaves, and weights are a few requests' and a few
turnovers' worth.

Costs about 85 bytes a block: up to 31 in queues, 8 each for stamp and prefix hash, 1 for the uses, 36 for 4 ghosts. Worth
is worked out anew every half turnover, in about a millisecond.
"""

from typing import NamedTuple

import numpy as np

from cache_service.eviction.ghosts import Ghosts, Traces, Uint8Array, Uint64Array, prefix_hashes, root_hash
from cache_service.eviction.policy import IsEvictable, Use
from cache_service.eviction.queue import BlockQueue, Stamps
from cache_service.eviction.shadow import LruShadow
from cache_service.eviction.worth import NUM_CLASSES, Worth, age_idx, first_age
from cache_service.types import Int32Array, Int64Array

_GHOSTS_PER_BLOCK = 4
_OVERRULES_BELOW = 0.5  # of the worth of the least recently used block
_ALLOWED_LOSS = 2  # requests' worth of hits behind LRU, before its order is taken
_GAIN_SPAN = 1  # turnovers of the cache over which gain and loss are remembered
_LEAST_LESSON = 256  # blocks between two lessons
_SAMPLE = 4096  # waiting blocks looked at in a lesson, so that it does not grow with the pool
_MOST_AHEAD = 64  # victims chosen ahead, and evicted ones that are no ghosts yet: a few cost as much as many


class _Head(NamedTuple):
    """The block that has waited longest of a class."""

    worth: float
    row: int
    stamp: int


class AdaptivePolicy:
    """See policy.EvictionPolicy and the module."""

    wants_uses = True

    def __init__(self, num_blocks: int, is_evictable: IsEvictable) -> None:
        self._num_blocks = num_blocks
        self._is_evictable = is_evictable
        self._uses: Uint8Array = np.zeros(num_blocks, np.uint8)  # 1 to NUM_CLASSES; 0 for what no sequence ended with
        self._hashes: Uint64Array = np.zeros(num_blocks, np.uint64)
        self._stamps = Stamps(num_blocks, is_evictable)
        self._queues = [BlockQueue(self._stamps) for _ in range(NUM_CLASSES)]
        self._chosen = BlockQueue(self._stamps)  # victims to be, in order
        self._evicted: list[tuple[Uint64Array, Uint8Array, Int64Array]] = []  # hashes, uses, stamps: not ghosts yet
        self._num_evicted = 0
        self._ghosts = Ghosts(_GHOSTS_PER_BLOCK * num_blocks)
        self._worth = Worth()
        self._shadow = LruShadow(num_blocks)
        self._num_waiting = 0
        self._gain = 0.0  # recent hits here less those that LRU would have had
        self._next_lesson = self._lesson_len = max(_LEAST_LESSON, num_blocks // 2)
        self._num_lessons = 0
        self._num_requests = self._num_used = 0

    def use(self, use: Use) -> None:
        count = len(use.blocks)
        if not count:
            return
        self._num_requests += 1
        self._num_used += count
        uses = self._uses[use.blocks]
        num_known = int(np.count_nonzero(uses))  # the first ones: a parent has at least a child's uses
        if num_known < count:
            block_size = len(use.tokens) // count
            before = int(self._hashes[use.blocks[num_known - 1]]) if num_known else root_hash(use.root)
            hashes = prefix_hashes(use.tokens[num_known * block_size :], block_size, num_known, before)
            self._hashes[use.blocks[num_known:]] = hashes
            self._make_ghosts()
            found = self._ghosts.pop(hashes, self._stamps.clock)
            self._worth.saw_reuse(found, self._stamps.clock)
            self._gain -= np.count_nonzero(self._shadow.leave(found.stamps[found.uses > 0]))
            uses[num_known:] = found.uses
        uses = np.minimum(uses + 1, NUM_CLASSES).astype(np.uint8)
        self._uses[use.blocks] = np.maximum.accumulate(uses[::-1])[::-1]

    def add(self, blocks: Int32Array) -> None:
        count = len(blocks)
        if not count:
            return
        stamps = self._stamps.give(blocks)
        self._num_waiting += count
        self._shadow.enter(count, self._stamps.clock)
        self._gain *= max(0, 1 - count / (_GAIN_SPAN * self._num_blocks))
        classes = np.maximum(self._uses[blocks], 1)
        for row in set(classes.tolist()):
            same = classes == row
            self._queues[row - 1].push(blocks[same], stamps[same])
        if self._stamps.clock >= self._next_lesson:
            self._learn()

    def hit(self, blocks: Int32Array) -> None:
        stamps = self._stamps.newest[blocks]
        self._worth.saw_reuse(Traces(self._uses[blocks], stamps), self._stamps.clock)
        self._gain += np.count_nonzero(~self._shadow.leave(stamps))
        self._end_wait(blocks)

    def forget(self, blocks: Int32Array) -> None:
        waited = blocks[self._stamps.newest[blocks] > 0]
        self._shadow.leave(self._stamps.newest[waited])
        self._end_wait(waited)
        self._uses[blocks] = 0

    def take(self, count: int) -> Int32Array:
        victims = self._chosen.pop(count)
        if len(victims) < count:
            self._choose(count - len(victims) + min(_MOST_AHEAD, self._num_blocks // 128))
            victims = np.concatenate([victims, self._chosen.pop(count - len(victims))])
        assert len(victims) == count, "asked for more victims than are evictable"
        self._remember(victims)
        self._end_wait(victims)
        self._shadow.shrink(self._num_waiting)
        self._uses[victims] = 0
        return victims

    def waiting(self) -> Int32Array:
        return np.concatenate([self._chosen.live(), *(queue.live() for queue in self._queues)])

    @property
    def _request_len(self) -> float:
        """Blocks of an average sequence."""
        return self._num_used / max(self._num_requests, 1)

    def _end_wait(self, blocks: Int32Array) -> None:
        self._stamps.newest[blocks] = 0
        self._num_waiting -= len(blocks)

    def _choose(self, count: int) -> None:
        """Moves the next count victims, or all there are, to the end of the chosen ones."""
        heads = [queue.oldest() for queue in self._queues]
        while count > 0:
            choice = self._lowest(heads)
            if choice is None:
                return
            row, until = choice
            blocks = self._queues[row].pop(count, until)
            self._chosen.push(blocks, self._stamps.newest[blocks])
            count -= len(blocks)
            heads[row] = self._queues[row].oldest()

    def _lowest(self, heads: list[int | None]) -> tuple[int, int] | None:
        """The class whose head goes next, and the last stamp up to which its blocks follow without another comparison."""
        now = self._stamps.clock
        there = [
            _Head(self._worth.table[row][age_idx(now - stamp)], row, stamp)
            for row, stamp in enumerate(heads)
            if stamp is not None
        ]
        if not there:
            return None
        lowest = min(there)  # the fewest uses among equals
        oldest = min(there, key=lambda head: head.stamp)
        may_overrule = self._gain >= -_ALLOWED_LOSS * self._request_len
        if may_overrule and lowest.worth < _OVERRULES_BELOW * oldest.worth:
            head, until = lowest, now
        else:
            head, until = oldest, min((other.stamp for other in there if other is not oldest), default=now)
        same_age = now - first_age(age_idx(now - head.stamp))
        return head.row, max(head.stamp, min(until, same_age))

    def _remember(self, victims: Int32Array) -> None:
        self._evicted.append((self._hashes[victims], self._uses[victims], self._stamps.newest[victims]))
        self._num_evicted += len(victims)
        if self._num_evicted >= _MOST_AHEAD:
            self._make_ghosts()

    def _make_ghosts(self) -> None:
        """Of the blocks evicted since the last time; before ghosts are looked for."""
        if not self._evicted:
            return
        hashes, uses, stamps = (np.concatenate(column) for column in zip(*self._evicted, strict=True))
        self._evicted, self._num_evicted = [], 0
        known = uses > 0
        lost = self._ghosts.put(hashes[known], uses[known], stamps[known], self._stamps.clock)
        self._worth.lost_sight(lost, self._stamps.clock)

    def _learn(self) -> None:
        now = self._stamps.clock
        every = -(-self._num_blocks // _SAMPLE)
        first = self._num_lessons % every
        blocks = np.arange(first, self._num_blocks, every, dtype=np.int32)
        blocks = blocks[self._is_evictable(blocks)]
        cached = Traces(self._uses[blocks], self._stamps.newest[blocks])
        ghosts = self._ghosts.sample(first, every, now)
        self._worth.learn([(cached, every), (ghosts, every)], now, self._request_len)
        self._num_lessons += 1
        self._next_lesson = now + self._lesson_len
