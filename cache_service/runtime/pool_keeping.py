"""PoolKeeping: the files of pools whose memory outlives the service: made for a new pool, taken over from an earlier run."""

import structlog

from kvkeeper.common.service.memory_limit import OutOfMemory
from kvkeeper.common.service.threads import in_thread

from ..config import CacheConfig
from ..core.manager import PoolManager
from ..core.values.errors import NotImplementedYet, OutOfPools
from ..core.values.kv_spec import KvSpec
from ..memory.arena import Arena, KeptArena
from ..memory.kept.block_digests import BlockDigests
from ..memory.kept.kept_pool import KeptPool
from ..memory.kept.memory_directory import MemoryDirectory
from ..memory.shared_memory import SharedMemoryArena
from .arena_supply import ArenaSupply
from .pool_keeper import PoolKeeper

log = structlog.get_logger()


class PoolKeeping:
    """In one folder."""

    def __init__(self, config: CacheConfig, directory: MemoryDirectory, arenas: ArenaSupply) -> None:
        self._config = config
        self._directory = directory
        self._arenas = arenas

    @property
    def outlives_stop(self) -> bool:
        """Whether the files stay when the service stops."""
        return self._directory.keep

    def check(self, spec: KvSpec) -> None:
        """Raises NotImplementedYet for several ranks, because one file keeps a pool's arena."""
        if spec.num_ranks > 1:
            raise NotImplementedYet("several ranks are not served beside --memory-dir", feature="tensor_parallel_size")

    async def keep(self, arena: Arena, host_arena: SharedMemoryArena | None, spec: KvSpec, manager: PoolManager) -> PoolKeeper:
        """The files of a new pool. Raises OutOfPools."""
        assert isinstance(arena, KeptArena), "the directory has allocated it"
        try:
            kept = await in_thread(self._directory.make_pool, arena, spec, manager.config.num_blocks)
            try:
                await self._keep_hosts(kept, host_arena, spec, manager)
            except BaseException:
                kept.close()
                raise
        except OutOfMemory as error:
            raise OutOfPools(f"no memory for another pool's index: {error}", flag="--memory-dir") from None
        keeper = self._keeper(manager, kept)
        try:
            await keeper.start()
        except BaseException:
            keeper.close(remove=False)  # the files go with the arenas
            raise
        return keeper

    async def left(self) -> list[KeptPool]:
        """The pools that earlier runs have left, the last used first. In a thread: pinning a host tier takes seconds."""
        return await in_thread(self._directory.open_pools)

    def settle(self) -> None:
        """Those that are wanted have been taken over, and all others refused."""
        self._directory.settle()

    def refuse(self, kept: KeptPool) -> None:
        """Removes the files of a pool that the configuration has no place for."""
        log.warning("kept_memory_refused", why="the configuration has other sizes, or no place for it")
        kept.remove()
        kept.close()
        for tier in kept.tiers:
            tier.arena.close()

    async def take_over(
        self, kept: KeptPool, spec: KvSpec, manager: PoolManager, num_host_bytes: int
    ) -> tuple[SharedMemoryArena | None, PoolKeeper]:
        """The host tier's arena and the keeper of an earlier run's pool, with what it has left in the index.

        num_host_bytes: of the host tier that the configuration wants. Raises OutOfMemory where that cannot be had.
        """
        host_arena = await self._take_over_hosts(kept, spec, manager, num_host_bytes)
        keeper = self._keeper(manager, kept)
        await keeper.restore(self._config.verify_blocks)
        return host_arena, keeper

    async def _take_over_hosts(
        self, kept: KeptPool, spec: KvSpec, manager: PoolManager, num_bytes: int
    ) -> SharedMemoryArena | None:
        """What an earlier run has left of the host tier, where the configuration has a place for it, or a new one."""
        if kept.hosts is not None:
            found, sizes = kept.hosts, (manager.config.num_host_blocks, num_bytes)
            if (found.num_blocks, found.arena.num_bytes) == sizes and found.index.description.spec == spec:
                assert isinstance(found.arena, SharedMemoryArena), "of a host tier"
                return found.arena
            log.warning("kept_memory_refused", why="the configuration has another host tier")
            kept.drop_hosts()
        try:
            host_arena = await self._arenas.take_host(num_bytes)
        except OutOfPools as error:
            raise OutOfMemory(str(error)) from None
        await self._keep_hosts(kept, host_arena, spec, manager)
        return host_arena

    async def _keep_hosts(
        self, kept: KeptPool, host_arena: SharedMemoryArena | None, spec: KvSpec, manager: PoolManager
    ) -> None:
        """The files of a new host tier. Raises OutOfMemory."""
        if host_arena is not None:
            await in_thread(self._directory.add_hosts, kept, host_arena, spec, manager.config.num_host_blocks)

    def _keeper(self, manager: PoolManager, kept: KeptPool) -> PoolKeeper:
        quiet = self._config.quarantine_quiet if self._config.device != "cpu" else 0.0
        return PoolKeeper(manager, kept, BlockDigests(kept) if self._config.block_digests else None, quiet)
