"""What would be left: the one calculator of blocks that a start, a swap, an eviction or a preemption asks about.

Owns no state and changes nothing. Knows block ids only.
"""

import math
from collections.abc import Iterable

import numpy as np

from ..values.pool_config import PoolConfig
from ..values.types import Int32Array
from .block_pool import BlockPool

_ROUNDING = 1e-9  # 0.7 of 10 blocks is 7 blocks


class BlocksLeft:
    """Asks the blocks of one pool."""

    def __init__(self, config: PoolConfig, pool: BlockPool) -> None:
        self._num_usable = config.num_usable_blocks
        self._pool = pool

    def beside(self, hits: Int32Array, num_spare: int) -> int:
        """Available blocks that are left once these distinct hits are held and num_spare are left alone; may be negative."""
        num_revived = self._pool.num_revived(hits) if len(hits) else 0
        return self._pool.num_available - num_revived - num_spare

    def num_filled_above(self, share: float) -> int:
        """How many of the held and cached blocks are above this share of the pool; may be negative."""
        return self._num_usable - len(self._pool.free) - self._share(share)

    def num_used_above(self, share: float) -> int:
        """How many of the blocks that cannot be had now are above this share of the pool; may be negative."""
        return self._pool.num_used - self._share(share)

    def freed_by(self, tables: Iterable[Int32Array]) -> list[int]:
        """Blocks that come free when each table and those before it go: nothing else holds them, a pin neither."""
        pool, total = self._pool, 0
        left: dict[int, int] = {}
        freed: list[int] = []
        for table in tables:
            for block in table.tolist():
                left[block] = left.get(block, int(pool.ref_counts[block])) - 1
                total += not left[block] and not pool.busy_counts[block]
            freed.append(total)
        return freed

    def num_held_once(self, table: Int32Array) -> int:
        """Blocks of a table that no other table and no pin holds."""
        return int(np.count_nonzero(self._pool.ref_counts[table] == 1))

    def _share(self, share: float) -> int:
        """Whole usable blocks in this share of the pool."""
        return math.floor(share * self._num_usable + _ROUNDING)
