"""Pools by KV spec.

Owns the pools, and which of them makes room. When all pools are taken, the least recently used pool without sessions does so,
unless idle pools are kept. The new pool gets fresh memory, which never held the old one's K and V. The cached blocks of the old
pool are lost, so its replacement is logged and reported.
"""

import asyncio
import gc
import time
from collections.abc import Callable

import structlog

from kvkeeper.common.service.memory_limit import OutOfMemory
from kvkeeper.common.service.threads import in_thread

from ..config import CacheConfig
from ..core.manager import PoolManager
from ..core.sequences.claims import StartNumbers
from ..core.values.errors import OutOfPools, PoolNotReady
from ..core.values.kv_spec import KvSpec
from ..core.values.pool_config import PoolConfig
from ..memory.arena import Arena
from ..memory.disk.disk_directory import DiskDirectory
from ..memory.kept.kept_pool import KeptPool
from ..memory.kept.memory_directory import MemoryDirectory
from ..memory.remote.open_remote import RemoteMaker
from ..memory.shared_memory import SharedMemoryArena
from ..preflight import pools_text
from .arena_supply import ArenaSupply, Memory
from .lower_tiers import LowerTiers, TierMaker
from .pool import Pool, PoolInfo
from .pool_keeper import PoolKeeper
from .pool_keeping import PoolKeeping
from .pool_sizes import PoolSizes

log = structlog.get_logger()


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
        *,
        owns_process: bool = False,
    ) -> None:
        """on_replaced is called with each pool that made room for another spec.

        directory: where pools outlive the service; the arenas are allocated there then. disks: where pools have their disk
        tier. now: the clock that gives pools the time. remote: makes the remote store of each pool. owns_process: the process
        is the service's alone, so that its garbage collector may leave out all that it holds.
        """
        self.num_replaced = 0
        self._config = config
        self._owns_process = owns_process
        self.sizes = PoolSizes(config, memory.available_bytes)
        self._arenas = ArenaSupply(config, memory, directory, now)
        self._tiers = LowerTiers(config, disks, remote, now)
        self._keeping = None if directory is None else PoolKeeping(config, directory, self._arenas)
        self._on_replaced = on_replaced
        self._pools: dict[bytes, Pool] = {}
        self._is_ready = False
        self._making = asyncio.Lock()  # one pool is made at a time
        self._num_uses = 0
        self._start_numbers = StartNumbers()  # shared by all pools, so that numbers are unique and ages comparable

    @property
    def pools(self) -> list[Pool]:
        return list(self._pools.values())

    @property
    def max_tokens(self) -> int:
        """The most tokens of a sequence, in the pool where it may have most of them."""
        return max((pool.info.max_tokens_with_retention for pool in self._pools.values()), default=0)

    @property
    def is_on_device(self) -> bool:
        """Whether blocks are in CUDA memory."""
        return self._config.device != "cpu"

    async def reserve(self) -> None:
        """Takes over what earlier runs have left, and allocates the memory whose size is known now.

        Raises OutOfMemory; its text names the flag.
        """
        await self._tiers.reserve()
        try:
            if self._keeping is not None:
                for kept in await self._keeping.left():
                    await self._restore(self._keeping, kept)
                self._keeping.settle()
            if self.sizes.is_known_ahead:
                num_pools = self._config.num_pools - len(self._pools)
                await self._arenas.reserve(num_pools, self.sizes.pool_memory, self.sizes.host_memory)
            else:
                self._arenas.forget_left()
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
        spec = self.sizes.stored(spec)
        async with self._making:
            pool = self._pools.get(spec.key)
            if pool is None:
                pool = self._pools[spec.key] = await self._make(spec, may_replace=may_replace)
                if self._owns_process:  # a large index is a million objects: a collection would stop the loop for 0.2 s
                    gc.freeze()
                log.info("pool_made", num_blocks=pool.info.num_blocks, model_id=spec.model_id)
                if self._config.host_kv_dtype not in ("auto", spec.host_kv_dtype):
                    log.info("host_kv_dtype_unused", model_id=spec.model_id, why="its blocks are no numbers of 16 or 32 bit")
            self._num_uses += 1
            pool.last_use = self._num_uses
            if pool.keeper is not None:
                pool.keeper.look()
            return pool

    def close(self) -> None:
        """Gives all memory back; what is kept stays in its folder."""
        keep = self._keeping is not None and self._keeping.outlives_stop
        self._arenas.close(keep=keep)
        for pool in self._pools.values():
            pool.close(keep=keep)
        self._pools.clear()

    async def _make(self, spec: KvSpec, *, may_replace: bool) -> Pool:
        if self._keeping is not None:
            self._keeping.check(spec)
        config, num_bytes = self.sizes.of(spec)
        is_full = not self._arenas.has_spare and len(self._pools) >= self._config.num_pools
        replaced = self._replaceable(may_replace=may_replace) if is_full else None
        # In a thread: writing the arrays of a large pool takes as long as many steps of other pools.
        try:
            manager = await in_thread(PoolManager, config, self._start_numbers, spec.key)
        except (OSError, MemoryError):
            text = "the system does not map rows for so many and so long sequences, see --max-sequences and"
            raise OutOfPools(f"{text} --max-tokens-per-sequence", flag="--max-tokens-per-sequence") from None
        if replaced is not None:  # after what may find no thread or memory
            await self._replace(replaced, spec)
        arena = await self._arenas.take(num_bytes)
        further: list[Arena] = []
        keeper: PoolKeeper | None = None
        host_arena: SharedMemoryArena | None = None
        disk: TierMaker | None = None
        remote: TierMaker | None = None
        try:
            for rank in range(1, spec.num_ranks):
                further.append(await self._arenas.take(num_bytes, rank))
            host_arena = await self._arenas.take_host(self.sizes.host_bytes(config, spec))
            disk = await self._tiers.make_disk_tier(spec, manager)
            remote = self._tiers.make_remote_tier(spec, manager)
            keeper = None if self._keeping is None else await self._keeping.keep(arena, host_arena, spec, manager)
            return Pool(spec, config, manager, arena, host_arena, keeper, disk, remote, further)
        except BaseException:
            if keeper is not None:
                keeper.close(remove=False)  # its files go with the arenas
            for maker in (disk, remote):
                if maker is not None:
                    maker.drop()
            for each in (arena, *further, host_arena):
                if each is not None:
                    self._arenas.drop(each)
            raise

    async def _restore(self, keeping: PoolKeeping, kept: KeptPool) -> None:
        """Takes over a pool of an earlier run, or removes its files where the configuration has no place for it.

        Raises OutOfMemory where its host tier cannot be had.
        """
        spec, arena = self.sizes.stored(kept.spec), kept.device.arena
        config = self._config_for(kept, spec)
        if config is None:
            keeping.refuse(kept)
            return
        manager = await in_thread(PoolManager, config, self._start_numbers, spec.key)
        host_arena, keeper = await keeping.take_over(kept, spec, manager, self.sizes.host_bytes(config, spec))
        disk = await self._tiers.make_disk_tier(spec, manager)
        remote = self._tiers.make_remote_tier(spec, manager)
        self._pools[spec.key] = Pool(spec, config, manager, arena, host_arena, keeper, disk, remote)

    def _config_for(self, kept: KeptPool, spec: KvSpec) -> PoolConfig | None:
        """The configuration of a pool of an earlier run; None where this service has no place for it, or wants another size."""
        if len(self._pools) >= self._config.num_pools or spec.key in self._pools:
            return None
        try:
            config, num_bytes = self.sizes.of(spec)
        except OutOfPools:
            return None
        found = kept.device
        return config if (config.num_blocks, num_bytes) == (found.num_blocks, found.arena.num_bytes) else None

    def _replaceable(self, *, may_replace: bool) -> bytes:
        """The key of the idle pool that was used longest ago. Raises OutOfPools."""
        idle = [pool for pool in self._pools.values() if pool.is_idle]
        if not idle:
            raise OutOfPools("every pool is in use by another KV spec, see --num-pools", flag="--num-pools")
        if self._config.keep_idle_pools:
            text = "every pool has another KV spec, and idle pools are kept, see --keep-idle-pools and --num-pools"
            raise OutOfPools(text, flag="--keep-idle-pools")
        if not may_replace:
            text = "every pool has another KV spec, and a credential of one tenant replaces none, see --num-pools"
            raise OutOfPools(text, flag="--num-pools")
        return min(idle, key=lambda pool: pool.last_use).key

    async def _replace(self, key: bytes, spec: KvSpec) -> None:
        """Closes an idle pool, to make room for one of another spec."""
        info, num_cached_blocks = self._pools[key].info, self._pools[key].manager.queries.stats().num_cached_blocks
        pool = self._pools.pop(key)
        self.num_replaced += 1
        asyncio.get_running_loop().call_soon(self._on_replaced, info)  # not here, where its failure would be the call's
        try:
            await pool.close_tiers()
        finally:
            pool.close()
        log.warning(
            "pool_replaced",
            model_id=info.spec.model_id,
            by_model_id=spec.model_id,
            num_blocks=info.num_blocks,
            num_cached_blocks=num_cached_blocks,
        )
        del pool
        if self._owns_process:
            gc.unfreeze()
        gc.collect()  # a pool refers to itself
