"""The blocks that plain LRU would keep in the same room: the measure of whether deviating from LRU pays.

LRU keeps the blocks used last, so its whole state is one time: it has every block that was used since, be it cached here or a
ghost. That time follows from the number of distinct blocks used since, which is counted in slices of time, a 256th of a
turnover each. What it has and the cache has evicted is counted likewise.
"""

import numpy as np
import numpy.typing as npt

from ..values.types import Int64Array

_SLICES_PER_POOL = 256
_NUM_SLICES = 2048


class LruShadow:
    """The waiting blocks of a simulated LRU. Times are stamps.

    A block enters when it begins to wait, and leaves when it is used again or when LRU would evict it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._slice_len = max(1, num_blocks // _SLICES_PER_POOL)
        self._counts: Int64Array = np.zeros(_NUM_SLICES, np.int64)  # kept blocks of the slices from _edge on; a ring
        self._evicted: Int64Array = np.zeros(_NUM_SLICES, np.int64)  # of these, the ghosts; a ring, too
        self._edge = 0
        self._num_kept = 0

    def enter(self, stamps: Int64Array) -> None:
        """Blocks begin to wait with these stamps, the newest ones."""
        slices = stamps // self._slice_len
        while self._edge <= slices[-1] - _NUM_SLICES:
            self._evict_slice()
        np.add.at(self._counts, slices % _NUM_SLICES, 1)
        self._num_kept += len(stamps)

    def leave(self, stamps: Int64Array) -> npt.NDArray[np.bool_]:
        """[n] whether LRU still had each of the blocks that waited since these stamps and are used again."""
        slices = stamps // self._slice_len
        kept = slices >= self._edge
        np.subtract.at(self._counts, slices[kept] % _NUM_SLICES, 1)
        self._num_kept -= int(np.count_nonzero(kept))
        return kept

    def has(self, stamps: Int64Array) -> npt.NDArray[np.bool_]:
        """[n] whether LRU has each of the blocks that wait since these stamps."""
        return stamps // self._slice_len >= self._edge

    def note_evicted(self, stamps: Int64Array) -> None:
        """Blocks that waited since these stamps are cached no more."""
        slices = stamps // self._slice_len
        np.add.at(self._evicted, slices[slices >= self._edge] % _NUM_SLICES, 1)

    def leave_ghosts(self, stamps: Int64Array, every: int) -> int:
        """Blocks that waited since these stamps come back; each stands for so many. Returns how many LRU still had."""
        kept = stamps[self.leave(stamps)]
        np.subtract.at(self._evicted, kept // self._slice_len % _NUM_SLICES, every)
        return every * len(kept)

    @property
    def num_missing(self) -> int:
        """Blocks that LRU would have and that are evicted."""
        return int(np.maximum(self._evicted, 0).sum())

    def shrink(self, room: int) -> None:
        """LRU now has room for `room` waiting blocks."""
        while self._num_kept > room:
            self._evict_slice()

    def _evict_slice(self) -> None:
        at = self._edge % _NUM_SLICES
        self._num_kept -= int(self._counts[at])
        self._counts[at] = self._evicted[at] = 0
        self._edge += 1
