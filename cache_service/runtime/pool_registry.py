"""Pools by KV spec, and the memory they stand on.

Owns the arenas. Memory is reserved before the first session (or, where the configuration counts blocks, when a spec first needs
it, because only then a block's size is known). When all pools are taken, the least recently used one that nobody can reach
makes room, unless idle pools are kept, and the new one gets fresh memory: its K and V are not the old one's. That is told, for
what was cached is gone. Does not know sessions, only who holds a pool.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cuda.handle import KIND as CUDA_KIND
from kvkeeper.service.memory_limit import OutOfMemory
from kvkeeper.service.sizes import size

from ..config import MAX_POOL_BLOCKS, CacheConfig
from ..core.manager import PoolManager
from ..core.sequences.claims import StartNumbers
from ..core.values.errors import OutOfPools, PoolNotReady
from ..core.values.types import Copies, PoolConfig, SessionId
from ..memory.arena import Arena, ByteArray
from ..memory.shared_memory import SharedMemory, SharedMemoryArena
from ..preflight import pools_text
from ..rpc.convert import kv_spec
from ..rpc.convert import sequences as convert

log = structlog.get_logger()

_MAX_INLINE_COPY_BYTES = 4 << 20  # about a millisecond
_SLICE_BLOCKS = 1024  # published in about a millisecond
_SLICE_ORDERS = 512  # of transfers that have ended, likewise
_PAUSE = 0.001  # seconds between two slices: a call takes a few turns of the loop, and each may meet a slice


class Memory(Protocol):
    """Where pools are made. Each call raises OutOfMemory, and may take its time, in a thread."""

    def require(self, num_bytes: int, num_host_bytes: int) -> None:
        """Refuse what cannot be had now: arenas of so many bytes together, and host tiers of so many."""

    def allocate(self, num_bytes: int) -> Arena: ...

    def allocate_host(self, num_bytes: int) -> SharedMemoryArena: ...


class Pool:
    """One KV spec's core and memory. The sets say who keeps it from making room for another."""

    def __init__(
        self,
        key: bytes,
        spec: pb.KvSpec,
        config: PoolConfig,
        arena: Arena,
        start_numbers: StartNumbers,
        host_arena: SharedMemoryArena | None = None,
    ) -> None:
        self.key = key
        self.manager = PoolManager(config, start_numbers)
        self.arena = arena
        self.host_arena = host_arena
        bytes_per_block = kv_spec.block_bytes(spec)
        num_hosts = config.num_host_blocks
        self.hosts: ByteArray | None = None  # [num_host_blocks, block_bytes]
        if host_arena is not None:
            self.hosts = host_arena.blocks(num_hosts, bytes_per_block)
        self.info = pb.PoolInfo(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            block_bytes=bytes_per_block,
            arena_bytes=config.num_blocks * bytes_per_block,
            max_sequences=config.max_sequences,
            max_tokens_per_sequence=config.limit_tokens,
            max_tokens_with_retention=config.max_tokens_per_sequence,
            spec=spec,
            eviction_policy=config.eviction_policy,
            prefix_caching=config.prefix_caching,
            num_host_blocks=num_hosts,
            host_arena_bytes=num_hosts * bytes_per_block,
            arena_kind=pb.ARENA_KIND_CUDA_IPC if arena.fields()["kind"] == CUDA_KIND else pb.ARENA_KIND_MEMFD,
        )
        self.sessions: set[SessionId] = set()
        self.mappings: set[SessionId] = set()  # sessions, living or ended, whose process still maps the arena
        self.quarantines: set[SessionId] = set()  # sessions that ended and may still write
        self.last_use = 0
        self.num_watches = 0
        self.num_lagged_watches = 0  # cut off over the pool's life
        self.copying: asyncio.Task[None] | None = None  # large copies in a thread; nothing is granted until they are done
        self._is_publishing = self._is_reclaiming = False

    def stats(self) -> pb.PoolStats:
        """Costs a look at every block."""
        self.manager.publish_pending()
        stats = convert.pool_stats(self.manager.stats(), self.info)
        stats.num_watches, stats.num_lagged_watches = self.num_watches, self.num_lagged_watches
        return stats

    def copy(self, copies: Copies) -> Awaitable[None] | None:
        """Runs a call's copies, in order; awaitable when they are large, so that everything but this pool goes on.

        Then they are a task of the service, not of the call, and go on when the call is cancelled. Until they are done a
        granted block could be one of their sources, so whoever grants blocks of this pool awaits `copying` first.
        """
        if len(copies) * self.info.block_bytes <= _MAX_INLINE_COPY_BYTES:
            self.arena.copy(copies, self.info.block_bytes, self.hosts)
            return None
        self.copying = asyncio.create_task(self._copy_in_thread(copies))
        return asyncio.shield(self.copying)

    async def _copy_in_thread(self, copies: Copies) -> None:
        try:
            await asyncio.to_thread(self.arena.copy, copies, self.info.block_bytes, self.hosts)
        finally:
            self.copying = None

    def publish_soon(self) -> None:
        """Publishes what steps committed when the reply being given is on its way, slice by slice, other calls between.

        Then cached blocks above the configured share are evicted, so that the next step finds its blocks free.
        """
        if not self._is_publishing:
            self._is_publishing = True
            asyncio.get_running_loop().call_soon(self._publish_slice)

    def publish_some(self) -> None:
        """The same for a reply that was given: the first slice at once."""
        if not self._is_publishing:
            self._publish_slice()

    def reclaim_soon(self) -> None:
        """Gives back what is left of sessions that ended, likewise."""
        if self.manager.reclaim.is_left and not self._is_reclaiming:
            self._is_reclaiming = True
            asyncio.get_running_loop().call_later(_PAUSE, self._reclaim_slice)

    def _publish_slice(self) -> None:
        is_left = self.manager.publish_pending(_SLICE_BLOCKS) or self.manager.end_some_transfers(_SLICE_ORDERS)
        self._is_publishing = is_left or self.manager.evict_excess(_SLICE_BLOCKS) > 0
        if self._is_publishing:
            asyncio.get_running_loop().call_later(_PAUSE, self._publish_slice)

    def _reclaim_slice(self) -> None:
        self._is_reclaiming = self.manager.reclaim_some(_SLICE_BLOCKS)
        if self._is_reclaiming:
            asyncio.get_running_loop().call_later(_PAUSE, self._reclaim_slice)

    def arena_fields(self) -> dict[str, object]:
        """What the attach socket says of its memory."""
        fields = {**self.arena.fields(), "num_bytes": self.info.arena_bytes}
        return {**fields, "num_host_bytes": self.info.host_arena_bytes} if self.host_arena is not None else fields

    def arena_descriptors(self) -> list[int]:
        """What it hands over beside that."""
        return self.arena.descriptors() + ([] if self.host_arena is None else self.host_arena.descriptors())

    def close(self) -> None:
        """Gives the memory back."""
        self.arena.close(is_mapped=bool(self.mappings))
        if self.host_arena is not None:
            self.host_arena.close()

    @property
    def is_idle(self) -> bool:
        return not (self.sessions or self.mappings or self.quarantines)


class PoolRegistry:
    """At most config.num_pools pools."""

    def __init__(self, config: CacheConfig, memory: Memory | None = None) -> None:
        self.num_replaced = 0
        self.on_replaced: Callable[[pb.PoolInfo], None] = lambda replaced: None  # a pool that made room for another spec
        self._config = config
        self._memory = memory or SharedMemory()
        self._pools: dict[bytes, Pool] = {}
        self._spare: list[Arena] = []
        self._spare_hosts: list[SharedMemoryArena] = []
        self._is_ready = False
        self._making = asyncio.Lock()  # one pool is made at a time
        self._num_uses = 0
        self._start_numbers = StartNumbers()  # of all pools that ever were: ages can be compared, and none is drawn twice

    @property
    def pools(self) -> list[Pool]:
        return list(self._pools.values())

    async def reserve(self) -> None:
        """Takes the memory that can be taken now. Raises OutOfMemory; its text names the flag."""
        if self._config.num_blocks is None:
            num_pools, num_bytes, num_host_bytes = self._config.num_pools, self._config.pool_memory, self._host_memory
            try:
                # Of all, before any is taken.
                self._memory.require(num_pools * num_bytes, num_pools * num_host_bytes)
                for _ in range(num_pools):
                    self._spare.append(await asyncio.to_thread(self._memory.allocate, num_bytes))
                    if num_host_bytes:
                        self._spare_hosts.append(await asyncio.to_thread(self._memory.allocate_host, num_host_bytes))
            except OutOfMemory as error:
                self.close()
                raise OutOfMemory(f"{pools_text(self._config)}, lower one: {error}") from None
        self._is_ready = True

    async def obtain(self, spec: pb.KvSpec) -> Pool:
        """The pool of a checked spec, made if there is none. Raises PoolNotReady, OutOfPools."""
        if not self._is_ready:
            raise PoolNotReady("the memory of the pools is being reserved")
        key = kv_spec.spec_key(spec)
        async with self._making:
            pool = self._pools.get(key)
            if pool is None:
                pool = self._pools[key] = await self._make(key, spec)
                # The index of a large pool is a million objects: looking at them, a collection would stop everybody for 0.2 s.
                gc.freeze()
                log.info("pool_made", num_blocks=pool.info.num_blocks, model_id=spec.model_id)
            self._num_uses += 1
            pool.last_use = self._num_uses
            return pool

    def close(self) -> None:
        """Gives all memory back."""
        for arena in [*self._spare, *self._spare_hosts]:
            arena.close()
        for pool in self._pools.values():
            pool.close()
        self._spare.clear()
        self._spare_hosts.clear()
        self._pools.clear()

    async def _make(self, key: bytes, spec: pb.KvSpec) -> Pool:
        bytes_per_block = kv_spec.block_bytes(spec)
        if self._config.num_blocks is None:
            num_blocks, num_bytes = min(self._config.pool_memory // bytes_per_block, MAX_POOL_BLOCKS), self._config.pool_memory
            if num_blocks < 2:
                raise OutOfPools(f"--pool-memory holds fewer than 2 blocks of {size(bytes_per_block)}", flag="--pool-memory")
        else:
            num_blocks, num_bytes = self._config.num_blocks, self._config.num_blocks * bytes_per_block
        config = PoolConfig(
            num_blocks=num_blocks,
            block_size=spec.block_size,
            max_sequences=self._config.max_sequences,
            max_tokens_per_sequence=self._config.tokens_of_sequence((num_blocks - 1) * spec.block_size),
            eviction_policy=self._config.eviction_policy,
            watermark=self._config.watermark,
            evict_above=self._config.evict_above,
            pressure_levels=self._config.pressure_levels,
            prefix_caching=self._config.prefix_caching,
            prefix_ttl=self._config.prefix_ttl,
            min_prefix_tokens=self._config.min_prefix_tokens,
            max_cached_blocks=self._config.max_cached_blocks,
            tenant_quota=self._config.tenant_quota,
            tenant_quotas=self._config.tenant_quotas,
            logits_memory=self._config.logits_memory,
            num_host_blocks=self._num_host_blocks(bytes_per_block),
        )
        arena = await self._arena(num_bytes, spec)
        try:
            return Pool(
                key, spec, config, arena, self._start_numbers, await self._host_arena(config.num_host_blocks * bytes_per_block)
            )
        except BaseException:
            arena.close()
            raise

    @property
    def _host_memory(self) -> int:
        return 0 if self._config.num_host_blocks else self._config.host_memory

    def _num_host_blocks(self, bytes_per_block: int) -> int:
        if self._config.num_host_blocks or not self._host_memory:
            return self._config.num_host_blocks
        if self._host_memory < 2 * bytes_per_block:
            raise OutOfPools(f"--host-memory holds fewer than 2 blocks of {size(bytes_per_block)}", flag="--host-memory")
        return min(self._host_memory // bytes_per_block, MAX_POOL_BLOCKS)

    async def _host_arena(self, num_bytes: int) -> SharedMemoryArena | None:
        if not num_bytes:
            return None
        if self._spare_hosts:
            return self._spare_hosts.pop()
        flag = "--num-host-blocks" if self._config.num_host_blocks else "--host-memory"
        try:
            return await asyncio.to_thread(self._memory.allocate_host, max(num_bytes, self._host_memory))
        except OutOfMemory as error:
            raise OutOfPools(f"no memory for another pool's host tier, see {flag}: {error}", flag=flag) from None

    async def _arena(self, num_bytes: int, spec: pb.KvSpec) -> Arena:
        if self._spare:
            return self._spare.pop()
        if len(self._pools) >= self._config.num_pools:
            self._replace_idle_pool(spec)
        flag = "--pool-memory" if self._config.num_blocks is None else "--num-blocks"
        try:
            return await asyncio.to_thread(self._memory.allocate, num_bytes)
        except OutOfMemory as error:
            raise OutOfPools(f"no memory for another pool, see {flag}: {error}", flag=flag) from None

    def _replace_idle_pool(self, spec: pb.KvSpec) -> None:
        idle = [pool for pool in self._pools.values() if pool.is_idle]
        if not idle:
            raise OutOfPools("every pool is in use by another KV spec, see --num-pools", flag="--num-pools")
        if self._config.keep_idle_pools:
            text = "every pool has another KV spec, and those that are idle are kept, see --keep-idle-pools and --num-pools"
            raise OutOfPools(text, flag="--keep-idle-pools")
        pool = self._pools.pop(min(idle, key=lambda pool: pool.last_use).key)
        info, num_cached_blocks = pool.info, pool.stats().num_cached_blocks
        pool.close()
        log.warning(
            "pool_replaced",
            model_id=info.spec.model_id,
            by_model_id=spec.model_id,
            num_blocks=info.num_blocks,
            num_cached_blocks=num_cached_blocks,
        )
        self.num_replaced += 1
        self.on_replaced(info)
        del pool, idle
        gc.unfreeze()
        gc.collect()  # it refers to itself
