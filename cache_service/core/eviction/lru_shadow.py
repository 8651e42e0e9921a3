"""What plain LRU would have kept, had it had the same room: the judge of whether to deviate from it.

LRU keeps the blocks used last, so all of its state is one time: what was used since is there, cached here or a ghost. Where
that time lies follows from how many distinct blocks were used since, which is counted in slices of time, a sixty-fourth of
a turnover each.
"""

import numpy as np
import numpy.typing as npt

from ..values.types import Int64Array

_SLICES_PER_POOL = 64
_NUM_SLICES = 4096


class LruShadow:
    """Times are stamps. Blocks enter when they begin to wait, and leave when they are used again or LRU evicts them."""

    def __init__(self, num_blocks: int) -> None:
        self._slice_len = max(1, num_blocks // _SLICES_PER_POOL)
        self._counts: Int64Array = np.zeros(_NUM_SLICES, np.int64)  # of the slices from _edge on; a ring
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
        """[n] whether LRU had still kept the blocks that have waited since these stamps, and are used again."""
        slices = stamps // self._slice_len
        kept = slices >= self._edge
        np.subtract.at(self._counts, slices[kept] % _NUM_SLICES, 1)
        self._num_kept -= int(np.count_nonzero(kept))
        return kept

    def shrink(self, room: int) -> None:
        """LRU has room for so many waiting blocks now."""
        while self._num_kept > room:
            self._evict_slice()

    def _evict_slice(self) -> None:
        at = self._edge % _NUM_SLICES
        self._num_kept -= int(self._counts[at])
        self._counts[at] = 0
        self._edge += 1
