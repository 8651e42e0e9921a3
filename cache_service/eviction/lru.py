"""Least recently used first: one queue.

Leaves before parents: a parent is held for as long as a child is, and becomes evictable with it or later.
"""

import numpy as np

from cache_service.eviction.policy import IsEvictable, Use
from cache_service.eviction.queue import BlockQueue, Stamps
from cache_service.types import Int32Array


class LruPolicy:
    """See policy.EvictionPolicy."""

    wants_uses = False

    def __init__(self, num_blocks: int, is_evictable: IsEvictable) -> None:
        self._stamps = Stamps(num_blocks, is_evictable)
        self._queue = BlockQueue(self._stamps)

    def use(self, use: Use) -> None:
        """Nothing: only the order of releases matters."""

    def add(self, blocks: Int32Array) -> None:
        self._queue.push(blocks, self._stamps.give(blocks))

    def hit(self, blocks: Int32Array) -> None:
        """Nothing: the entry went stale by itself."""

    def forget(self, blocks: Int32Array) -> None:
        """Nothing, likewise."""

    def take(self, count: int) -> Int32Array:
        victims = self._queue.pop(count)
        assert len(victims) == count, "asked for more victims than are evictable"
        self._stamps.newest[victims] = 0
        return victims

    def waiting(self) -> Int32Array:
        return self._queue.live() if self._stamps.clock else np.empty(0, np.int32)
