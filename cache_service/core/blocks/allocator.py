"""Blocks for sequences, cleared where they held another tenant's tokens (R8).

Owns which tenant's tokens each block held last. Does not know which operation asks.
"""

from typing import Protocol

import numpy as np

from ..index.prefix_index import PrefixIndex
from ..values.counters import Counters
from ..values.types import UNKNOWN_TENANT, Int32Array
from .block_pool import BlockPool


class ClearLog(Protocol):
    """Where the allocator writes what must be cleared before it is used."""

    def clear(self, blocks: list[int]) -> None: ...


class BlockAllocator:
    """Allocates from the blocks of one pool."""

    def __init__(self, pool: BlockPool, index: PrefixIndex, counters: Counters) -> None:
        self.last_tenants: Int32Array = np.zeros(pool.num_blocks, np.int32)  # the tenant whose tokens each block held last
        self._pool = pool
        self._index = index
        self._counters = counters

    def allocate(self, log: ClearLog, count: int, tenants: Int32Array) -> Int32Array:
        """[count] blocks for sequences of these tenants ([count] or a scalar); another tenant's are cleared first."""
        if count:
            self._index.eviction_log.needed_by = tenants
        blocks = self._pool.allocate(count)
        last_tenants = self.last_tenants
        if len(self._index.roots.tenants) > 1:
            before = last_tenants[blocks]
            foreign = blocks[(before != 0) & (before != tenants)].tolist()
            log.clear(foreign)
            self._counters.num_cleared_blocks += len(foreign)
        last_tenants[blocks] = tenants
        return blocks

    def allocate_for_copies(self, count: int, tenant: int) -> Int32Array:
        """[count] blocks that a copy of this tenant's tokens overwrites whole."""
        self._index.eviction_log.needed_by = tenant
        blocks = self._pool.allocate(count)
        self.last_tenants[blocks] = tenant
        return blocks

    def allocate_for_loads(self, count: int) -> Int32Array:
        """[count] blocks that loads are to overwrite whole; until note_loaded no tenant may trust them."""
        blocks = self._pool.allocate(count)
        self.distrust(blocks)
        return blocks

    def note_loaded(self, blocks: Int32Array, tenants: list[int]) -> None:
        """Loads have filled these blocks [n] with tokens of these tenants [n]."""
        self.last_tenants[blocks] = tenants

    def distrust(self, blocks: Int32Array) -> None:
        """What was ordered for these blocks may never have run: each is cleared before its next use."""
        self.last_tenants[blocks] = UNKNOWN_TENANT
