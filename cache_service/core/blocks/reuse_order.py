"""The eviction order of a pool whose clients say what they know of reuse: an order of its own around the pool's policy.

Owns the class of each block: NONE goes before all that the policy orders, and SOON goes after it, in a class for each time that
it may wait, the shortest first. In a class blocks wait in the order of their last use. A pool makes one with its first hint;
until then hints cost nothing.

Rules. Blocks of a sequence that says NONE are NONE from the time when the index names them, and are no longer as soon as a
sequence that does not say so, or a pin, holds them. The end of a sequence changes the class of its tail: of the last indexed
blocks that lead to this end alone, because nothing else holds them and they never had another child. After NONE it is NONE, and
after anything but SOON it is no longer SOON. Above the tail a class is only raised: to SOON for the whole path, and after NONE
from NONE for what several sequences have shared. Whose hints count, hint_record.py knows; a hint of a prefix, or with a time,
counts also where nearly all say the same. At most a share of the pool waits as SOON, each block for the time of its class: then
it waits where the policy has it. Where there are more, and under pressure, the tenant with most yields first, so that what a
tenant retains within an equal part of the share stays, whatever the others hint; of its blocks the one that waits longest, of
the shortest time.

Leaves before parents: no class is higher than the one of the block above it, and all queues and the lapse take the child
first. As with any policy, a parent that began to wait before its child, under retention or a transfer, may go before it.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ..eviction import EvictionPolicy, Use
from ..eviction.block_queue import BlockQueue, Stamps, Sweeper
from ..eviction.policy import Order
from ..index.node_links import NO_NODE
from ..index.prefix_index import PrefixIndex
from ..index.roots import MAX_TENANTS
from ..values.types import NO_INT32, Int32Array, ReuseHint
from .hint_record import HintRecord

SOON_SECONDS = (60.0, 600.0, 3600.0)  # that a block waits as SOON, by class
_STAMPS_PER_MS = 1 << 20
_LAST, _NORMAL, _FIRST = -1, 0, 1  # what ReuseHint.NONE, UNSPECIFIED and SOON make of a block; with longer times 2 and 3
_MOST_VISITED = 256  # queues in one go
_SLICE_BLOCKS, _SLICE_CLASSES = 256, 65_536  # audited, and looked at, in less than a millisecond
_LEVELS = range(_FIRST, _FIRST + len(SOON_SECONDS))
_SHOWN = {_LAST: ReuseHint.NONE, _NORMAL: ReuseHint.UNSPECIFIED, _FIRST: ReuseHint.SOON}  # longer times as _FIRST


class ReuseOrder:
    """An EvictionPolicy around another one. Stamps show the time, too: milliseconds times 2^20, as in cache_limits.py."""

    def __init__(
        self,
        policy: EvictionPolicy,
        index: PrefixIndex,
        ref_counts: Int32Array,
        most_soon: int,
        num_evictable: Callable[[], int],
    ) -> None:
        """most_soon: blocks that may wait as SOON."""
        self.policy = policy
        self.wants_uses = policy.wants_uses
        self.num_none = self.num_soon = 0  # waiting blocks
        self._index = index
        self._ref_counts = ref_counts
        self._most_soon = most_soon
        self._num_evictable = num_evictable
        self._classes: npt.NDArray[np.int8] = np.zeros(len(ref_counts), np.int8)
        self._stamps = Stamps(0)  # of every wait that began since there are hints
        self._stamps.newest = np.zeros(len(ref_counts), np.int64)  # untouched: a call that gives a hint looks at no block
        self._none = BlockQueue(self._stamps)
        self._queues = {(0, _LAST): self._none}  # of blocks that wait as SOON by tenant and class, and the one of NONE
        self._sweeper = Sweeper()
        self._tenants: Int32Array = np.zeros(len(ref_counts), np.int32)  # by block that is expected soon: its number, below 0
        self._num_soon_of: Int32Array = np.zeros(MAX_TENANTS + 1, np.int32)  # waiting blocks by -tenant
        self._num_visited = 0  # queues in which nothing that has lapsed is left
        self.record = HintRecord(len(ref_counts))
        index.links.count_children()

    def get_hint(self, block: int) -> ReuseHint:
        """The hint that a block's class comes from."""
        return _SHOWN[min(int(self._classes[block]), _FIRST)]

    # What sequences say

    def note_new(self, blocks: Int32Array) -> None:
        """The index is about to name these blocks, of sequences that say NONE."""
        self._classes[blocks] = _LAST

    def claim(self, blocks: Int32Array) -> None:
        """A sequence that does not say NONE, or a pin, holds these blocks."""
        self._classes[blocks] = np.maximum(self._classes[blocks], _NORMAL)

    def end_sequence(self, tenant: int, path: Int32Array, hint: int, seconds: float) -> None:
        """A sequence is about to release its indexed blocks, from the root down, and says this. seconds: 0 for none."""
        self.record.note_path(self._index.eviction_log.get_digests(self._index.node_of_block[path]))
        is_distinctive = self.record.note_end(tenant, hint)
        self.note_hint(tenant, path, hint, seconds, counts=is_distinctive or seconds > 0)

    def note_hint(self, tenant: int, path: Int32Array, hint: int, seconds: float, *, counts: bool = True) -> None:
        """This is known of a tenant's indexed blocks, from the root down, whose holder is about to release them.

        seconds: that SOON is at least, where there is a class of as many. counts: whether it does if the tenant is trusted.
        """
        if len(path) and self._ref_counts[path[-1]] == 1:
            digest, time = self._index.eviction_log.digest(int(self._index.node_of_block[path[-1]])), self._index.clock.now
            self.record.watch(tenant, digest, hint, seconds if hint == ReuseHint.SOON else 0.0, time)
        if not counts or not self.record.is_trusted(tenant, hint):
            if hint == ReuseHint.SOON:  # what waits as SOON since it counted
                self._lapse([(tenant, min(max(len(path), 1), int(self._num_soon_of[-tenant])))])
            hint = ReuseHint.UNSPECIFIED
        if hint == ReuseHint.SOON:
            level = _FIRST + min(bisect_left(SOON_SECONDS, seconds), len(SOON_SECONDS) - 1)
            self._classes[path], self._tenants[path] = np.maximum(self._classes[path], level), tenant
            return
        is_none = hint == ReuseHint.NONE
        if is_none:
            self.claim(path[: self._index.links.num_shared(self._index.node_of_block[path])])
        else:
            self.claim(path)
        if is_none or (self._classes[path] > _NORMAL).any():
            tail = path[self._tail_start(path) :]
            self._classes[tail] = np.minimum(self._classes[tail], _LAST if is_none else _NORMAL)

    def lapse(self, now: float, max_blocks: int) -> bool:
        """Ends the time of up to max_blocks that wait as SOON for too long. Whether more may be left."""
        since = enumerate(SOON_SECONDS, _FIRST)
        until = {level: (int((now - seconds) * 1000) + 1) * _STAMPS_PER_MS - 1 for level, seconds in since} | {_LAST: 0}
        keys, lapsed = list(self._queues)[self._num_visited :], [NO_INT32]
        visited = keys[:_MOST_VISITED]
        for key in visited:
            lapsed.append(self._queues[key].pop(max_blocks, until[key[1]]))
            max_blocks -= len(lapsed[-1])
        self._end_waits(np.concatenate(lapsed))
        if not max_blocks or len(visited) < len(keys):
            self._num_visited += sum(key in self._queues for key in visited) if max_blocks else 0
            return True
        self._num_visited = 0
        return False

    def _tail_start(self, path: Int32Array) -> int:
        """Where the blocks begin that lead to the end of this path alone."""
        if not len(path):
            return 0
        stops = (self._ref_counts[path] != 1) | self._index.links.lead_apart(self._index.node_of_block[path])
        found = stops.nonzero()[0]
        return int(found[-1]) + 1 if len(found) else 0

    def _lapse(self, shares: list[tuple[int, int]]) -> None:
        """Ends the wait of so many blocks of each of these tenants as SOON."""
        self._end_waits(self._pop_soon(shares))

    def _end_waits(self, blocks: Int32Array) -> None:
        """These blocks wait as SOON no longer, but where the policy has them."""
        if len(blocks):
            self._count(blocks, -1)
            self._classes[blocks] = _NORMAL
            self.policy.add(blocks)

    def _pop_soon(self, shares: list[tuple[int, int]]) -> Int32Array:
        """So many of each of these tenants: of the shortest time first, and of these what waits longest."""
        popped = [NO_INT32]
        for tenant, count in shares:
            for level in _LEVELS:
                if count and (queue := self._queues.get((tenant, level))) is not None:
                    popped.append(queue.pop(count))
                    count -= len(popped[-1])
        return np.concatenate(popped)

    def _above(self, count: int) -> list[tuple[int, int]]:
        """Which tenants give up so many blocks that wait as SOON: those that have most, down to the same number."""
        counts = self._num_soon_of[: len(self._index.roots.tenants) + 1].astype(np.int64)
        order = np.argsort(-counts, kind="stable")
        held = counts[order]
        sums = np.cumsum(held)
        given = sums - np.arange(1, len(held) + 1) * np.append(held[1:], 0)  # once the first n have as many as the next one
        num_yielding = int(np.searchsorted(given, count)) + 1
        each, more = divmod(int(sums[num_yielding - 1]) - count, num_yielding)
        left = np.full(num_yielding, each) + (np.arange(num_yielding) < more)
        return list(zip((-order).tolist(), (held[:num_yielding] - left).tolist(), strict=False))

    # As an EvictionPolicy

    def use(self, use: Use) -> None:
        self.policy.use(use)

    def add(self, blocks: Int32Array) -> None:
        if not len(blocks):
            return
        self._stamps.clock = max(self._stamps.clock, int(self._index.clock.now * 1000) * _STAMPS_PER_MS)
        stamps, classes = self._stamps.give(blocks), self._classes[blocks]
        if not classes.any():
            self.policy.add(blocks)
            return
        self._none.push(blocks[classes == _LAST], stamps[classes == _LAST])
        soon = classes >= _FIRST
        for key in set(zip(self._tenants[blocks[soon]].tolist(), classes[soon].tolist(), strict=True)):
            if key not in self._queues:
                self._queues[key] = BlockQueue(self._stamps)
            chosen = (self._tenants[blocks] == key[0]) & (classes == key[1])
            self._queues[key].push(blocks[chosen], stamps[chosen])
        self._count(blocks, 1)
        self.policy.add(blocks[classes == _NORMAL])
        self._sweeper.pay(len(blocks), self._queues.values())
        if self.num_soon > self._most_soon:
            self._lapse(self._above(self.num_soon - self._most_soon))

    def hit(self, blocks: Int32Array, *, is_found: bool = True) -> None:
        self._stamps.end_waits(blocks)
        self._count(blocks, -1)
        others = blocks[self._classes[blocks] == _NORMAL]
        if len(others):
            self.policy.hit(others, is_found=is_found)

    def note_cut(self, blocks: Int32Array, num_lost: int) -> None:
        self.policy.note_cut(blocks, num_lost)

    def forget_blocks(self, blocks: Int32Array) -> None:
        waited = blocks[self._stamps.newest[blocks] > 0]
        self._count(waited, -1)
        self._stamps.end_waits(waited)
        self._classes[blocks] = _NORMAL
        self.policy.forget_blocks(blocks)

    def take_victims(self, count: int) -> Int32Array:
        num_others = self._num_evictable() - self.num_none - self.num_soon
        first = self._none.pop(min(count, self.num_none))
        others = self.policy.take_victims(min(count - len(first), num_others))
        num_last = count - len(first) - len(others)
        last = self._pop_soon(self._above(num_last)) if num_last else NO_INT32
        if len(first) or len(last):
            self.forget_blocks(np.concatenate([first, last]))
        self._stamps.end_waits(others)
        victims = np.concatenate([first, others, last])
        assert len(victims) == count, "asked for more victims than are evictable"
        return victims

    def prepare(self) -> None:
        self.policy.prepare()

    def order(self) -> Order:
        """The order of the blocks that wait in neither queue."""
        return self.policy.order()

    def _count(self, blocks: Int32Array, change: int) -> None:
        """These blocks begin or end to wait."""
        classes = self._classes[blocks]
        self.num_none += change * int(np.count_nonzero(classes == _LAST))
        soon = blocks[classes >= _FIRST]
        if len(soon):
            self.num_soon += change * len(soon)
            tenants = self._tenants[soon]
            np.add.at(self._num_soon_of, -tenants, np.int32(change))
            for tenant in set(tenants.tolist()) if change < 0 else ():
                if not self._num_soon_of[-tenant]:
                    for level in _LEVELS:
                        self._queues.pop((tenant, level), None)

    # For audits

    def own_order(self) -> Order:
        """The order of the blocks that wait in a queue of this one."""
        return Order(self._stamps, [row for queue in self._queues.values() for row in queue.rows()], self._stamps.clock)

    def are_own(self, some: slice) -> npt.NDArray[np.bool_]:
        """[blocks of a slice] whether each waits in a queue of this one."""
        return (self._stamps.newest[some] > 0) & (self._classes[some] != _NORMAL)

    def check(self) -> Iterator[list[str]]:
        """The broken invariants of the classes, in slices."""
        yield self._check_numbers()
        for start in range(0, len(self._classes), _SLICE_CLASSES):
            blocks = self._classes[start : start + _SLICE_CLASSES].nonzero()[0] + start
            for at in range(0, len(blocks), _SLICE_BLOCKS):
                yield [text for block in blocks[at : at + _SLICE_BLOCKS].tolist() for text in self._check_block(block)]
            yield []

    def _check_numbers(self) -> list[str]:
        waits = self._classes[self._stamps.newest > 0]
        is_right = (self.num_none, self.num_soon) == (np.count_nonzero(waits == _LAST), np.count_nonzero(waits >= _FIRST))
        wrong = [] if is_right else ["the numbers of blocks that are not expected back, or soon, are wrong"]
        return wrong if self.num_soon <= self._most_soon else [*wrong, "more blocks are expected soon than may be"]

    def _check_block(self, block: int) -> Iterator[str]:
        """A block that is not normal against its parent and its children."""
        index, kind = self._index, int(self._classes[block])
        node = int(index.node_of_block[block])
        if kind == _NORMAL:  # since the slice began
            return
        if node == NO_NODE:
            yield f"block {block} has a class without being indexed"
        elif kind >= _FIRST:
            parent = index.parent(node)
            if parent > 0 and self._goes_first(int(index.block_of_node[parent]), block):
                yield f"block {block} is expected sooner than the one above it"
        else:
            child = int(index.links.first_child[node])
            while child:
                if self._goes_first(block, int(index.block_of_node[child])):
                    yield f"block {block} is expected later than one below it"
                    return
                child = int(index.links.next_sibling[child])

    def _goes_first(self, parent: int, child: int) -> bool:
        """Whether both wait, the parent no longer than the child, and its class goes before the child's."""
        since = self._stamps.newest
        both_wait = 0 < since[child] < since[parent]
        return bool(both_wait) and bool(self._classes[parent] < self._classes[child])
