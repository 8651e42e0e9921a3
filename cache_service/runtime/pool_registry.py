"""Pools by KV spec, and the memory they stand on.

Owns the arenas. Memory is reserved before the first session; where the configuration counts blocks, it is reserved when a spec
first needs it, because a block's size is unknown before. When all pools are taken, the least recently used pool without
sessions makes room, unless idle pools are kept. The new pool gets fresh memory, which never held the old one's K and V. The
cached blocks of the old pool are lost, so its replacement is logged and reported.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from kvkeeper.service.memory_limit import OutOfMemory
from kvkeeper.service.sizes import size

from ..config import CacheConfig, most_blocks
from ..core.manager import PoolManager
from ..core.sequences.claims import StartNumbers
from ..core.tiers.named_tier import NamedTier
from ..core.tiers.tier_orders import TierRules
from ..core.values.errors import NotImplementedYet, OutOfPools, PoolNotReady
from ..core.values.kv_spec import WHOLE, KvSpec
from ..core.values.pool_config import PoolConfig
from ..memory.arena import Arena, ByteArray, KeptArena
from ..memory.block_digests import BlockDigests
from ..memory.disk.disk_directory import DiskDirectory
from ..memory.disk.slab import Slab
from ..memory.kept_file import KeptPool
from ..memory.memory_directory import MemoryDirectory
from ..memory.remote.open_remote import RemoteMaker
from ..memory.shared_memory import SharedMemoryArena
from ..preflight import pools_text
from .pool import Pool, PoolInfo, PoolTierMaker
from .pool_keeper import PoolKeeper
from .pool_tier import Place, PoolTier

log = structlog.get_logger()

_LOOK_AGAIN = 0.25  # seconds, for memory of a device
_MOST_ASKED = 1024  # blocks of a prompt, in one question to a remote server


class Memory(Protocol):
    """Allocates arenas. Each call raises OutOfMemory; allocations may be slow and run in a thread."""

    def require(self, num_bytes: int, num_host_bytes: int) -> None:
        """Refuses where arenas of num_bytes together and host tiers of num_host_bytes cannot be allocated now."""

    def allocate(self, num_bytes: int, rank: int = 0) -> Arena:
        """rank: whose arena it is to be, which may be on a device of its own."""

    def allocate_host(self, num_bytes: int) -> SharedMemoryArena: ...


class PoolRegistry:
    """At most config.num_pools pools."""

    def __init__(
        self,
        config: CacheConfig,
        memory: Memory,
        on_replaced: Callable[[PoolInfo], None],
        directory: MemoryDirectory | None = None,
        disks: DiskDirectory | None = None,
        now: Callable[[], float] = time.monotonic,
        remote: RemoteMaker | None = None,
    ) -> None:
        """on_replaced is called with each pool that made room for another spec.

        directory: where pools outlive the service; the arenas are allocated there then. disks: where pools have their disk
        tier. now: the clock that pools are told the time of. remote: makes the remote store of each pool.
        """
        self._disks = disks
        self._now = now
        self._remote = remote
        self.num_replaced = 0
        self._config = config
        self._memory: Memory = directory or memory
        self._directory = directory
        self._on_replaced = on_replaced
        self._pools: dict[bytes, Pool] = {}
        self._spare: list[Arena] = []
        self._spare_hosts: list[SharedMemoryArena] = []
        self._is_ready = False
        self._making = asyncio.Lock()  # one pool is made at a time
        self._num_uses = 0
        self._start_numbers = StartNumbers()  # shared by all pools, so that numbers are unique and ages comparable

    @property
    def pools(self) -> list[Pool]:
        return list(self._pools.values())

    @property
    def is_on_device(self) -> bool:
        """Whether blocks are in CUDA memory."""
        return self._config.device != "cpu"

    async def reserve(self) -> None:
        """Takes over what earlier runs have left, and allocates the memory whose size is known now.

        Raises OutOfMemory; its text names the flag.
        """
        is_sized = self._config.num_blocks is None
        if self._disks is not None:
            await asyncio.to_thread(self._disks.reserve)
        try:
            if self._directory is not None:
                for kept in self._directory.open_pools():
                    await self._restore(kept)
                self._directory.settle()
                num_spares = self._config.num_pools - len(self._pools) if is_sized else 0
                sizes = (self._config.pool_memory, num_spares), (self._host_memory, num_spares if self._host_memory else 0)
                spares, self._spare_hosts = self._directory.open_spares(*sizes)
                self._spare += spares
            if is_sized:
                await self._reserve_spares(self._config.num_pools - len(self._pools))
        except OutOfMemory as error:
            self.close()
            raise OutOfMemory(f"{pools_text(self._config)}, lower one: {error}") from None
        self._is_ready = True

    async def obtain(self, spec: KvSpec, *, may_replace: bool = True) -> Pool:
        """The pool of a checked spec, made if there is none. may_replace: an idle one, with what all tenants have cached there.

        Raises PoolNotReady, OutOfPools.
        """
        if not self._is_ready:
            raise PoolNotReady("the memory of the pools is being reserved")
        async with self._making:
            pool = self._pools.get(spec.key)
            if pool is None:
                pool = self._pools[spec.key] = await self._make(spec, may_replace=may_replace)
                # The index of a large pool is a million objects: a collection of them would stop the loop for 0.2 s.
                gc.freeze()
                log.info("pool_made", num_blocks=pool.info.num_blocks, model_id=spec.model_id)
            self._num_uses += 1
            pool.last_use = self._num_uses
            if pool.keeper is not None:
                pool.keeper.look()
            return pool

    def close(self) -> None:
        """Gives all memory back; what is kept stays in its folder."""
        keep = self._directory is not None and self._directory.keep
        for arena in (*self._spare, *self._spare_hosts):
            if not keep:
                self._forget_file(arena)
            arena.close()
        for pool in self._pools.values():
            pool.close(keep=keep)
        self._spare.clear()
        self._spare_hosts.clear()
        self._pools.clear()

    async def _reserve_spares(self, num_pools: int) -> None:
        """Memory for so many pools, all of it asked for before the first is allocated. Raises OutOfMemory."""
        num_bytes, num_host_bytes = self._config.pool_memory, self._host_memory
        num_missing, num_missing_hosts = num_pools - len(self._spare), num_pools - len(self._spare_hosts)
        await self._require(num_missing * num_bytes, num_missing_hosts * num_host_bytes)
        for _ in range(num_missing):
            self._spare.append(await asyncio.to_thread(self._memory.allocate, num_bytes))
        for _ in range(num_missing_hosts if num_host_bytes else 0):
            self._spare_hosts.append(await asyncio.to_thread(self._memory.allocate_host, num_host_bytes))

    async def _require(self, num_bytes: int, num_host_bytes: int) -> None:
        """Waits for memory of a device that an earlier run's engines have mapped, or that the driver takes back. See Memory."""
        deadline = self._now() + self._config.device_wait
        is_told = False
        while True:
            try:
                return self._memory.require(num_bytes, num_host_bytes)
            except OutOfMemory as error:
                if not error.on_device or self._now() >= deadline:
                    raise
                if not is_told:
                    log.warning("waiting_for_device_memory", why=str(error), seconds=self._config.device_wait)
                    is_told = True
            await asyncio.sleep(_LOOK_AGAIN)

    def _check_groups(self, spec: KvSpec) -> None:
        """Raises NotImplementedYet for a tail where pools have what it does without."""
        has_host = bool(self._config.num_host_blocks or self._host_memory)
        if (has_host or self._directory is not None) and any(group.is_tail for group in spec.groups):
            raise NotImplementedYet("a tail is not served beside a host tier or --memory-dir", feature="layer_groups")

    def _check_ranks(self, spec: KvSpec) -> None:
        """Raises NotImplementedYet for several ranks where one file is to keep a pool's arena."""
        if spec.num_ranks > 1 and self._directory is not None:
            raise NotImplementedYet("several ranks are not served beside --memory-dir", feature="tensor_parallel_size")

    async def _make(self, spec: KvSpec, *, may_replace: bool) -> Pool:
        self._check_groups(spec)
        self._check_ranks(spec)
        config, num_bytes = self._sizes(spec)
        if not self._spare and len(self._pools) >= self._config.num_pools:
            self._replace_idle_pool(spec, may_replace=may_replace)
        # In a thread: writing the arrays of a large pool takes as long as many steps of other pools.
        manager = await asyncio.to_thread(PoolManager, config, self._start_numbers)
        arena = await self._arena(num_bytes)
        further: list[Arena] = []
        host_arena: SharedMemoryArena | None = None
        try:
            for rank in range(1, spec.num_ranks):
                further.append(await self._arena(num_bytes, rank))
            host_arena = await self._host_arena(self._host_bytes(config, spec))
            disk = await self._disk_of(spec, manager)
            remote = self._remote_of(spec, manager)
            keeper = None if self._directory is None else await self._keep(self._directory, arena, host_arena, spec, manager)
            return Pool(spec, config, manager, arena, host_arena, keeper, disk, remote, further)
        except BaseException:
            for each in (arena, *further, host_arena):
                if each is not None:
                    self._forget_file(each)
                    each.close()
            raise

    async def _disk_of(self, spec: KvSpec, manager: PoolManager) -> PoolTierMaker | None:
        """The disk tier of a pool, with what earlier runs have left. A disk that cannot be had costs hits, not the pool."""
        if self._disks is None:
            return None
        try:
            slab: Slab = await asyncio.to_thread(self._disks.obtain, spec)
            stored = await asyncio.to_thread(slab.scan)
        except (OutOfMemory, OSError) as error:
            log.warning("disk_refused", model_id=spec.model_id, why=str(error))
            return None
        config = self._config
        rules = TierRules(
            on_second_use=config.disk_admit == "second-use",
            deadline=config.disk_deadline,
            weighs=config.tier_worth == "auto",
            tenants=frozenset(config.disk_tenants) or None,
        )
        form, policy = slab.form, config.disk_eviction_policy
        tier = manager.add_disk(slab.name_key, form.num_slots, slab.era, stored, rules, policy)
        return partial(_pool_tier, tier, slab, self._now, partial(self._disks.give_back, slab))

    def _remote_of(self, spec: KvSpec, manager: PoolManager) -> PoolTierMaker | None:
        """The remote tier of a pool with a host tier. The server is not asked yet."""
        if self._remote is None:
            return None
        config, store = self._config, self._remote(spec)
        rules = TierRules(
            on_second_use=config.remote_admit == "second-use",
            deadline=config.remote_deadline,
            most_asked=_MOST_ASKED,
            name="remote",
            weighs=config.tier_worth == "auto",
            tenants=frozenset(config.remote_tenants) or None,
        )
        return partial(_pool_tier, manager.add_remote(store.name_key, rules), store, self._now, lambda: None)

    async def _keep(
        self,
        directory: MemoryDirectory,
        arena: Arena,
        host_arena: SharedMemoryArena | None,
        spec: KvSpec,
        manager: PoolManager,
    ) -> PoolKeeper:
        """The files of a new pool. Raises OutOfPools."""
        assert isinstance(arena, KeptArena), "the directory has allocated it"
        try:
            kept = await asyncio.to_thread(directory.make_pool, arena, spec, manager.config.num_blocks)
            try:
                await self._keep_hosts(directory, kept, host_arena, manager)
            except BaseException:
                kept.close()
                raise
        except OutOfMemory as error:
            raise OutOfPools(f"no memory for another pool's index: {error}", flag="--memory-dir") from None
        keeper = self._keeper(manager, kept)
        await keeper.start()
        return keeper

    async def _keep_hosts(
        self, directory: MemoryDirectory, kept: KeptPool, host_arena: SharedMemoryArena | None, manager: PoolManager
    ) -> None:
        """The files of a new host tier. Raises OutOfMemory."""
        if host_arena is not None:
            await asyncio.to_thread(directory.add_hosts, kept, host_arena, manager.config.num_host_blocks)

    def _keeper(self, manager: PoolManager, kept: KeptPool) -> PoolKeeper:
        quiet = self._config.quarantine_quiet if self.is_on_device else 0.0
        return PoolKeeper(manager, kept, BlockDigests(kept) if self._config.block_digests else None, quiet)

    def _forget_file(self, arena: Arena) -> None:
        """Of an arena that is closed and not kept."""
        if self._directory is not None and isinstance(arena, KeptArena):
            self._directory.remove_arena(arena)

    async def _restore(self, kept: KeptPool) -> None:
        """Takes over a pool of an earlier run, or removes its files where the configuration has no place for it.

        Raises OutOfMemory where its host tier cannot be had.
        """
        spec, has_place = kept.spec, len(self._pools) < self._config.num_pools and kept.spec.key not in self._pools
        device = kept.device
        try:
            config, num_bytes = self._sizes(spec)
            has_place &= (config.num_blocks, num_bytes) == (device.num_blocks, device.arena.num_bytes)
        except OutOfPools:
            has_place = False
        if not has_place:
            log.warning("kept_memory_refused", why="the configuration has other sizes, or no place for it")
            kept.remove()
            kept.close()
            for tier in kept.tiers:
                tier.arena.close()
            return
        manager = await asyncio.to_thread(PoolManager, config, self._start_numbers)
        host_arena = await self._restore_hosts(kept, manager)
        keeper = self._keeper(manager, kept)
        await keeper.restore(self._config.verify_blocks)
        disk = await self._disk_of(spec, manager)
        remote = self._remote_of(spec, manager)
        self._pools[spec.key] = Pool(spec, config, manager, device.arena, host_arena, keeper, disk, remote)

    async def _restore_hosts(self, kept: KeptPool, manager: PoolManager) -> SharedMemoryArena | None:
        """The host tier of a pool of an earlier run: what that has left, where the configuration has a place for it, or anew.

        Raises OutOfMemory.
        """
        assert self._directory is not None, "kept pools lie in a folder"
        num_bytes = self._host_bytes(manager.config, kept.spec)
        if kept.hosts is not None:
            if (kept.hosts.num_blocks, kept.hosts.arena.num_bytes) == (manager.config.num_host_blocks, num_bytes):
                assert isinstance(kept.hosts.arena, SharedMemoryArena), "of a host tier"
                return kept.hosts.arena
            log.warning("kept_memory_refused", why="the configuration has another host tier")
            kept.drop_hosts()
        try:
            host_arena = await self._host_arena(num_bytes)
        except OutOfPools as error:
            raise OutOfMemory(str(error)) from None
        await self._keep_hosts(self._directory, kept, host_arena, manager)
        return host_arena

    def _host_bytes(self, config: PoolConfig, spec: KvSpec) -> int:
        """Bytes of a host tier's arena; 0 where there is none."""
        return max(config.num_host_blocks * spec.stored_bytes, self._host_memory) if config.num_host_blocks else 0

    def _sizes(self, spec: KvSpec) -> tuple[PoolConfig, int]:
        """The configuration of a pool of this spec, and the bytes of its arena. Raises OutOfPools."""
        bytes_per_block = spec.block_bytes
        if self._config.num_blocks is None:
            num_blocks, num_bytes = most_blocks(self._config.pool_memory, bytes_per_block), self._config.pool_memory
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
            soon_share=self._config.soon_share,
            pressure_levels=self._config.pressure_levels,
            prefix_caching=self._config.prefix_caching,
            prefix_ttl=self._config.prefix_ttl,
            min_prefix_tokens=self._config.min_prefix_tokens,
            max_cached_blocks=self._config.max_cached_blocks,
            tenant_quota=self._config.tenant_quota,
            tenant_quotas=self._config.tenant_quotas,
            logits_memory=self._config.logits_memory,
            num_host_blocks=self._num_host_blocks(spec.stored_bytes),
            group_spans=tuple(group.span for group in spec.groups) or (WHOLE,),
            has_tail=any(group.is_tail for group in spec.groups),
        )
        return config, num_bytes

    @property
    def _host_memory(self) -> int:
        return 0 if self._config.num_host_blocks else self._config.host_memory

    def _num_host_blocks(self, bytes_per_block: int) -> int:
        if self._config.num_host_blocks or not self._host_memory:
            return self._config.num_host_blocks
        if self._host_memory < 2 * bytes_per_block:
            raise OutOfPools(f"--host-memory holds fewer than 2 blocks of {size(bytes_per_block)}", flag="--host-memory")
        return most_blocks(self._host_memory, bytes_per_block)

    async def _host_arena(self, num_bytes: int) -> SharedMemoryArena | None:
        if not num_bytes:
            return None
        if self._spare_hosts:
            return self._spare_hosts.pop()
        flag = "--num-host-blocks" if self._config.num_host_blocks else "--host-memory"
        try:
            return await asyncio.to_thread(self._memory.allocate_host, num_bytes)
        except OutOfMemory as error:
            raise OutOfPools(f"no memory for another pool's host tier, see {flag}: {error}", flag=flag) from None

    async def _arena(self, num_bytes: int, rank: int = 0) -> Arena:
        """Those of the first rank alone are reserved ahead: how many ranks there will be is not known before."""
        if self._spare and not rank:
            return self._spare.pop()
        flag = "--pool-memory" if self._config.num_blocks is None else "--num-blocks"
        try:
            return await asyncio.to_thread(self._memory.allocate, num_bytes, *([rank] if rank else []))
        except OutOfMemory as error:
            raise OutOfPools(f"no memory for another pool, see {flag}: {error}", flag=flag) from None

    def _replace_idle_pool(self, spec: KvSpec, *, may_replace: bool) -> None:
        idle = [pool for pool in self._pools.values() if pool.is_idle]
        if not idle:
            raise OutOfPools("every pool is in use by another KV spec, see --num-pools", flag="--num-pools")
        if self._config.keep_idle_pools:
            text = "every pool has another KV spec, and idle pools are kept, see --keep-idle-pools and --num-pools"
            raise OutOfPools(text, flag="--keep-idle-pools")
        if not may_replace:
            text = "every pool has another KV spec, and a credential of one tenant replaces none, see --num-pools"
            raise OutOfPools(text, flag="--num-pools")
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
        self._on_replaced(info)
        del pool, idle
        gc.unfreeze()
        gc.collect()  # a pool refers to itself


def _pool_tier(
    tier: NamedTier,
    place: Place,
    now: Callable[[], float],
    give_back: Callable[[], None],
    manager: Callable[[], PoolManager],
    hosts: ByteArray,
) -> PoolTier:
    return PoolTier(manager, tier, place, hosts, now, give_back)
