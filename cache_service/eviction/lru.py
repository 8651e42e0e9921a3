"""Least recently used first.

A queue in arrays with lazy deletion: becoming evictable appends (block, stamp); a block that was hit meanwhile, or released
again, leaves a stale entry behind that is skipped when it comes up. A linked list would make every hit and release of a
long table a walk in Python; here each is one array operation, and stale entries are swept when the arrays are full.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from cache_service.types import Int32Array, Int64Array

_LEAST_TAKE = 64  # entries looked at in one go


class LruPolicy:
    """See eviction.EvictionPolicy."""

    def __init__(self, num_blocks: int, is_evictable: Callable[[Int32Array], npt.NDArray[np.bool_]]) -> None:
        self._is_evictable = is_evictable
        self._stamps: Int64Array = np.zeros(num_blocks, np.int64)  # of each block's newest entry
        self._clock = 0
        capacity = 2 * num_blocks + 2 * _LEAST_TAKE
        self._blocks: Int32Array = np.zeros(capacity, np.int32)
        self._entry_stamps: Int64Array = np.zeros(capacity, np.int64)
        self._head = self._tail = 0

    def add(self, blocks: Int32Array) -> None:
        count = len(blocks)
        if self._tail + count > len(self._blocks):
            self._sweep()
        stamps = np.arange(self._clock + 1, self._clock + count + 1)
        self._clock += count
        self._stamps[blocks] = stamps
        self._blocks[self._tail : self._tail + count] = blocks
        self._entry_stamps[self._tail : self._tail + count] = stamps
        self._tail += count

    def take(self, count: int) -> Int32Array:
        victims: list[Int32Array] = []
        while count > 0:
            assert self._head < self._tail, "asked for more victims than are evictable"
            end = min(self._tail, self._head + max(count, _LEAST_TAKE))
            live = np.flatnonzero(self._is_live(self._head, end))[:count]
            victims.append(self._blocks[self._head + live])
            count -= len(live)
            self._head = end if count else self._head + int(live[-1]) + 1
        taken = np.concatenate(victims) if victims else np.empty(0, np.int32)
        self._stamps[taken] = 0
        return taken

    def waiting(self) -> Int32Array:
        return self._blocks[self._head + np.flatnonzero(self._is_live(self._head, self._tail))]

    def _is_live(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        blocks = self._blocks[start:end]
        return (self._stamps[blocks] == self._entry_stamps[start:end]) & self._is_evictable(blocks)

    def _sweep(self) -> None:
        """Moves the live entries to the front. At most num_blocks are live, so half of the arrays comes free."""
        live = self._head + np.flatnonzero(self._is_live(self._head, self._tail))
        self._blocks[: len(live)] = self._blocks[live]
        self._entry_stamps[: len(live)] = self._entry_stamps[live]
        self._head, self._tail = 0, len(live)
