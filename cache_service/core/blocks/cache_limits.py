"""Limits of cached blocks: a time to live, a number of blocks, a share per tenant.

Owns the order in which blocks became evictable, in all and per tenant, and the tenants above their share. Rules: leaves before
parents, because a parent becomes evictable with its child or later; a tenant above its share loses its own least recently used
blocks before any other tenant loses one; limits are enforced in slices, after the reply where they do not concern it. Pinned
blocks count for their tenant's share and for no other limit; blocks that sequences hold count for none. A pool without limits
keeps no counts.

Stamps show the time, too: the millisecond at which a block became evictable, times 2^20. So the blocks that have outlived their
time are those up to a stamp, and a clock that goes back makes no block older. They are evicted in slices, and a look-up asks
which they are before that, so that none is a hit for longer than its time.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..eviction.block_queue import BlockQueue, Stamps, Sweeper
from ..index.prefix_index import PrefixIndex
from ..index.roots import MAX_TENANTS
from ..values.pool_config import PoolConfig
from ..values.types import Int32Array

_STAMPS_PER_MS = 1 << 20


class Evictor(Protocol):
    """The part of BlockPool that limits act on."""

    num_evictable: int

    def evict(self, count: int) -> None: ...

    def expire(self, blocks: Int32Array) -> int: ...


class CacheLimits:
    """The limits of one pool's cached blocks, and the blocks and tenants that are above them."""

    def __init__(self, config: PoolConfig, index: PrefixIndex) -> None:
        self._index = index
        self._ttl = config.prefix_ttl
        self._max_cached = config.max_cached_blocks
        self._num_usable = config.num_usable_blocks
        self._quotas = dict(config.tenant_quotas)  # shares by tenant
        self._quota_of_tenant: dict[int, int] = {}  # blocks, of tenants with a share of their own
        self._default_quota = self._blocks(config.tenant_quota)
        self.has_quotas = config.tenant_quota < 1 or bool(self._quotas)
        self.wants_order = (
            self.has_quotas or self._ttl is not None
        )  # reports of blocks that become evictable, and of those that no longer are
        self.is_on = self.wants_order or self._max_cached is not None
        self.num_expired = 0
        self.num_quota_evictions = 0
        if not self.wants_order:
            return
        self._stamps = Stamps(config.num_blocks)
        self._queue = BlockQueue(self._stamps)
        self._queues: dict[int, BlockQueue] = {}  # by tenant
        self._sweeper, self._sweeper_by_tenant = Sweeper(), Sweeper()
        self.over: set[int] = set()  # the tenants above their share
        self.counts: Int32Array = np.zeros(MAX_TENANTS + 1, np.int32)  # evictable blocks by -tenant
        self.pinned: Int32Array = np.zeros(MAX_TENANTS + 1, np.int32)  # distinct blocks that pins hold, by -tenant
        self._tenants: Int32Array = np.zeros(config.num_blocks, np.int32)  # by evictable block
        if self.has_quotas:
            index.tenant_of_node = np.zeros(len(index.block_of_node), np.int32)

    def name_tenant(self, name: str, tenant: int) -> None:
        """A tenant was given its number."""
        if name in self._quotas:
            self._quota_of_tenant[tenant] = self._blocks(self._quotas[name])

    def quota(self, tenant: int) -> int:
        """Most blocks that this tenant may keep cached."""
        return self._quota_of_tenant.get(tenant, self._default_quota)

    def room_for_pins(self, tenant: int) -> int:
        """How many more blocks the pins of this tenant may hold under its share, whatever else it has cached."""
        return self.quota(tenant) - int(self.pinned[-tenant]) if self.has_quotas else self._num_usable

    def count_pinned(self, tenant: int, change: int) -> None:
        """The pins of this tenant hold so many distinct blocks more, or fewer."""
        if self.has_quotas:
            self.pinned[-tenant] += change
            self._judge(tenant)

    def add_evictable(self, blocks: Int32Array) -> None:
        """These blocks became evictable, leaves before parents."""
        if not len(blocks):
            return
        self._stamps.clock = max(self._stamps.clock, int(self._index.clock.now * 1000) * _STAMPS_PER_MS)
        stamps = self._stamps.give(blocks)
        if self._ttl is not None:
            self._queue.push(blocks, stamps)
            self._sweeper.pay(len(blocks), [self._queue])
        if self.has_quotas:
            self._tenants[blocks] = tenants = self._get_tenants(blocks)
            for tenant in set(tenants.tolist()):
                same = tenants == tenant
                if tenant not in self._queues:
                    self._queues[tenant] = BlockQueue(self._stamps)
                self._queues[tenant].push(blocks[same], stamps[same])
                self._count(tenant, int(np.count_nonzero(same)))
            self._sweeper_by_tenant.pay(len(blocks), self._queues.values())

    def drop_evictable(self, blocks: Int32Array) -> None:
        """These blocks are no longer evictable."""
        self._stamps.end_waits(blocks)
        if self.has_quotas and len(blocks):
            tenants, counts = np.unique(self._tenants[blocks], return_counts=True)
            for tenant, count in zip(tenants.tolist(), counts.tolist(), strict=True):
                self._count(tenant, -count)
                if not self.counts[-tenant]:
                    self._queues.pop(tenant, None)

    def take_above_quota(self, count: int) -> Int32Array:
        """[at most count] victims: the least recently used blocks of tenants above their share."""
        victims = [np.empty(0, np.int32)]
        for tenant in sorted(self.over, reverse=True):  # the oldest tenant first
            victims.append(self._queues[tenant].pop(min(self._excess(tenant), count)))
            count -= len(victims[-1])
        taken = np.concatenate(victims)
        self.num_quota_evictions += len(taken)
        return taken

    def enforce(self, pool: Evictor, max_blocks: int) -> bool:
        """Evicts up to max_blocks of the blocks above the limits. Returns whether more are left."""
        excess = 0
        if self.has_quotas and self.over:
            excess = sum(self._excess(tenant) for tenant in self.over)
        if self._max_cached is not None:
            excess = max(excess, pool.num_evictable - self._max_cached)
        if excess > 0:
            pool.evict(min(excess, max_blocks))
        return excess > max_blocks

    def expire(self, pool: Evictor, max_blocks: int) -> bool:
        """Evicts up to max_blocks of the blocks unused for their time to live. Returns whether more may be left."""
        if self._ttl is None:
            return False
        outlived = self._queue.pop(max_blocks, until=self._last_outlived())
        if len(outlived):
            self.num_expired += pool.expire(outlived)
        return len(outlived) == max_blocks

    def have_outlived(self) -> bool:
        """Whether there are blocks unused for their time to live that are not evicted yet."""
        if self._ttl is None:
            return False
        first = self._queue.first()
        return first is not None and int(self._stamps.newest[first]) <= self._last_outlived()

    def outlived(self, blocks: Int32Array) -> npt.NDArray[np.bool_]:
        """[n] which of these blocks are unused for their time to live."""
        if self._ttl is None:
            return np.zeros(len(blocks), np.bool_)
        stamps = self._stamps.newest[blocks]
        return np.asarray((stamps > 0) & (stamps <= self._last_outlived()))

    def _last_outlived(self) -> int:
        """The last stamp of a block that has outlived its time by now."""
        assert self._ttl is not None
        return (int((self._index.clock.now - self._ttl) * 1000) + 1) * _STAMPS_PER_MS - 1

    def check(self, is_evictable: np.ndarray) -> list[str]:
        """The broken invariants, for audits; is_evictable is by block."""
        if not self.wants_order:
            return []
        blocks, wrong = np.flatnonzero(is_evictable), list[str]()
        if self._ttl is not None and not np.array_equal(np.sort(self._queue.live()), blocks):
            wrong.append("the blocks that wait for their time to live are not the evictable ones")
        if self.has_quotas:
            tenants = self._get_tenants(blocks.astype(np.int32))
            if not np.array_equal(self.counts, np.bincount(-tenants, minlength=len(self.counts))):
                wrong.append("a tenant has the wrong number of evictable blocks")
            if self.over != {tenant for tenant in set(tenants.tolist()) if self._excess(tenant) > 0}:
                wrong.append("the tenants above their share are wrong")
            for tenant, queue in self._queues.items():
                if not np.array_equal(np.sort(queue.live()), blocks[tenants == tenant]):
                    wrong.append("a tenant's evictable blocks are not those in its queue")
        return wrong

    def _get_tenants(self, blocks: Int32Array) -> Int32Array:
        """[n] the tenant of each of these indexed blocks."""
        index = self._index
        assert index.tenant_of_node is not None, "tenants are counted where there are quotas"
        tenants, is_partial = index.tenant_of_node[index.node_of_block[blocks]], index.partials.is_named[blocks]
        if np.count_nonzero(is_partial):
            tenants[is_partial] = index.partials.tenants(blocks[is_partial])
        return tenants

    def _count(self, tenant: int, change: int) -> None:
        self.counts[-tenant] += change
        self._judge(tenant)

    def _excess(self, tenant: int) -> int:
        """Evictable blocks of a tenant above its share; 0 or less where it keeps to it."""
        return int(self.counts[-tenant]) + int(self.pinned[-tenant]) - self.quota(tenant)

    def _judge(self, tenant: int) -> None:
        if self._excess(tenant) > 0:
            self.over.add(tenant)
        else:
            self.over.discard(tenant)

    def _blocks(self, share: float) -> int:
        return int(share * self._num_usable)
