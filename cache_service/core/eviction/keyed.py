"""Policies that keep one number per block, its key, and evict the lowest key first, the least recently used among equals.

Leaves before parents: a use gives each block the highest key of the blocks below it, so a parent's key is never lower than a
child's, and among equals the queue has the child first. A block that no ended sequence had, such as the truncated tail of a
running one, has the lowest key of all. Costs 8 bytes a block for the key, beside 12 an entry and 8 for the stamp.

Only keys of waiting blocks have a queue, because there may be as many keys as there were uses. A block keeps its key
while it waits, so a block that leaves is counted off the right queue. A use changes the keys of held blocks, and of states that
its sequence left behind: those wait anew.
"""

import heapq
from abc import ABC, abstractmethod

import numpy as np

from ..values.distinct import distinct
from ..values.types import Int32Array, Int64Array
from .block_queue import BlockQueue, Stamps, Sweeper
from .policy import Order, Use

_UNUSED = int(np.iinfo(np.int64).min)
_LEAST_ORDER = 64  # keys without a queue that may stay in the heap


class KeyedPolicy(ABC):
    """Base of the EvictionPolicies with keys. A subclass says how a use changes the keys."""

    wants_uses = True

    def __init__(self, num_blocks: int) -> None:
        self._keys: Int64Array = np.full(num_blocks, _UNUSED, np.int64)
        self._stamps = Stamps(num_blocks)
        self._sweeper = Sweeper()
        self._queues: dict[int, BlockQueue] = {}
        self._num_waiting: dict[int, int] = {}  # waiting blocks by key; as in _queues, keys without blocks are left out
        self._order: list[int] = []  # heap of the keys in _queues, and of a few former keys

    def use(self, use: Use) -> None:
        if len(use.blocks):
            keys = self._new_keys(self._keys[use.blocks], use)
            self._keys[use.blocks] = np.maximum.accumulate(keys[::-1])[::-1]
            if len(use.beside):
                waiting = distinct(use.beside[self._stamps.newest[use.beside] > 0])
                waiting = waiting[np.argsort(self._stamps.newest[waiting])]
                self._leave(waiting)
                self._keys[use.beside] = self._keys[use.blocks[use.places]]
                self._push(waiting, self._keys[waiting])

    def add(self, blocks: Int32Array) -> None:
        self._push(blocks, self._keys[blocks])

    def hit(self, blocks: Int32Array, *, is_found: bool = True) -> None:
        self._leave(blocks)

    def note_cut(self, blocks: Int32Array, num_lost: int) -> None:  # noqa: B027  no hit is counted
        """Nothing."""

    def forget_blocks(self, blocks: Int32Array) -> None:
        self._leave(blocks[self._stamps.newest[blocks] > 0])
        self._forget_past(blocks)

    def take_victims(self, count: int) -> Int32Array:
        victims: list[Int32Array] = []
        while count > 0:
            assert self._queues, "asked for more victims than are evictable"
            popped = self._pop_lowest(count)
            victims.append(popped)
            count -= len(popped)
        taken = np.concatenate(victims) if victims else np.empty(0, np.int32)
        self._stamps.end_waits(taken)
        self._forget_past(taken)
        return taken

    def prepare(self) -> None:  # noqa: B027  a base that is complete
        """Nothing was put off."""

    def order(self) -> Order:
        rows = [row for queue in self._queues.values() for row in queue.rows()]
        return Order(self._stamps, rows, self._stamps.clock)

    @abstractmethod
    def _new_keys(self, keys: Int64Array, use: Use) -> Int64Array:
        """[n] keys of a sequence's blocks after its use, from the root down; _UNUSED stands for a block's first use."""

    def _forget_past(self, blocks: Int32Array) -> None:
        """The contents of these blocks are no longer cached."""
        self._keys[blocks] = _UNUSED

    def _push(self, blocks: Int32Array, keys: Int64Array) -> None:
        stamps = self._stamps.give(blocks)
        for key in set(keys.tolist()):
            if key not in self._queues:
                self._queues[key], self._num_waiting[key] = BlockQueue(self._stamps), 0
                heapq.heappush(self._order, key)
            same = keys == key
            self._queues[key].push(blocks[same], stamps[same])
            self._num_waiting[key] += int(np.count_nonzero(same))
        self._sweeper.pay(len(blocks), self._queues.values())

    def _pop_lowest(self, count: int) -> Int32Array:
        """At most count blocks of the lowest key."""
        while self._order[0] not in self._queues:
            heapq.heappop(self._order)
        key = self._order[0]
        popped = self._queues[key].pop(count)
        assert len(popped), "a key that has a queue has a block that waits"
        self._count_off(key, len(popped))
        return popped

    def _leave(self, blocks: Int32Array) -> None:
        """These blocks no longer wait."""
        self._stamps.end_waits(blocks)
        keys, counts = np.unique(self._keys[blocks], return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            self._count_off(key, count)

    def _count_off(self, key: int, count: int) -> None:
        left = self._num_waiting[key] = self._num_waiting[key] - count
        if left:
            self._queues[key].shrink_to(left)
            return
        del self._queues[key], self._num_waiting[key]
        if len(self._order) > 2 * len(self._queues) + _LEAST_ORDER:
            self._order = sorted(self._queues)


class LfuPolicy(KeyedPolicy):
    """Fewest uses first: the number of sequences that held the block when they ended."""

    def _new_keys(self, keys: Int64Array, use: Use) -> Int64Array:
        return np.maximum(keys, 0) + 1


class PriorityPolicy(KeyedPolicy):
    """Lowest priority first: a block has the highest priority of the sequences that held it when they ended."""

    def _new_keys(self, keys: Int64Array, use: Use) -> Int64Array:
        return np.maximum(keys, use.priority)


class LongestFirstPolicy(KeyedPolicy):
    """Blocks of the longest sequences first; a shared block counts for the shortest sequence that held it."""

    def _new_keys(self, keys: Int64Array, use: Use) -> Int64Array:
        return np.maximum(keys, -use.num_blocks)
