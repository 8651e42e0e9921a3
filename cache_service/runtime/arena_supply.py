"""ArenaSupply: the arenas of pools: those that are reserved ahead, and those that are made for a spec.

Memory is reserved before the first session where its size is known by then. Where the configuration counts blocks, it is made
when a spec first needs it, because a block's size is unknown before. An arena never held another pool's K and V.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

import structlog

from kvkeeper.common.service.memory_limit import OutOfMemory
from kvkeeper.common.service.threads import in_thread

from ..config import CacheConfig
from ..core.values.errors import OutOfPools
from ..memory.arena import Arena, KeptArena
from ..memory.kept.memory_directory import MemoryDirectory
from ..memory.shared_memory import SharedMemoryArena

T = TypeVar("T")

log = structlog.get_logger()

_LOOK_AGAIN = 0.25  # seconds, for memory of a device


class Memory(Protocol):
    """Allocates arenas. Each call raises OutOfMemory; allocations may be slow and run in a thread."""

    def available_bytes(self) -> int:
        """Bytes that arenas can have now."""

    def require(self, num_bytes: int, num_host_bytes: int) -> None:
        """Refuses where arenas of num_bytes together and host tiers of num_host_bytes cannot be allocated now."""

    def allocate(self, num_bytes: int, rank: int = 0) -> Arena:
        """rank: whose arena it is to be, which may be on a device of its own."""

    def allocate_host(self, num_bytes: int) -> SharedMemoryArena: ...


class ArenaSupply:
    """Allocates the arenas of one service. directory: where arenas outlive it; they are allocated there then."""

    def __init__(
        self, config: CacheConfig, memory: Memory, directory: MemoryDirectory | None, now: Callable[[], float]
    ) -> None:
        self._config = config
        self._memory: Memory | MemoryDirectory = directory or memory
        self._directory = directory
        self._now = now
        self._spare: list[Arena] = []
        self._spare_hosts: list[SharedMemoryArena] = []

    @property
    def has_spare(self) -> bool:
        return bool(self._spare)

    async def reserve(self, num_pools: int, num_bytes: int, num_host_bytes: int) -> None:
        """Arenas for so many pools; num_host_bytes: of each pool's host tier, or 0. Raises OutOfMemory.

        Those that earlier runs have left come first. All others are asked for before the first is allocated.
        """
        num_hosts = num_pools if num_host_bytes else 0
        if self._directory is not None:
            pools, hosts = (num_bytes, num_pools), (num_host_bytes, num_hosts)
            spares, self._spare_hosts = await in_thread(self._directory.open_spares, pools, hosts)
            self._spare += spares
        num_missing, num_missing_hosts = num_pools - len(self._spare), num_hosts - len(self._spare_hosts)
        await self._require(num_missing * num_bytes, num_missing_hosts * num_host_bytes)
        # Side by side: the system takes long to clear so many pages.
        made = await asyncio.gather(
            *(self._add(self._spare, self._memory.allocate, num_bytes) for _ in range(num_missing)),
            *(self._add(self._spare_hosts, self._memory.allocate_host, num_host_bytes) for _ in range(num_missing_hosts)),
            return_exceptions=True,  # the others' are there by then, to be closed
        )
        for error in made:
            if error is not None:
                raise error

    async def _add(self, spares: list[T], allocate: Callable[[int], T], num_bytes: int) -> None:
        spares.append(await in_thread(allocate, num_bytes))

    def forget_left(self) -> None:
        """What earlier runs have reserved and not used is not wanted."""
        if self._directory is not None:
            self._directory.open_spares()

    async def take(self, num_bytes: int, rank: int = 0) -> Arena:
        """A pool's. Those of the first rank alone are reserved ahead: how many ranks there will be is not known before.

        Raises OutOfPools.
        """
        if self._spare and not rank:
            return self._spare.pop()
        flag = "--pool-memory" if self._config.num_blocks is None else "--num-blocks"
        try:
            return await in_thread(self._memory.allocate, num_bytes, *([rank] if rank else []))
        except OutOfMemory as error:
            raise OutOfPools(f"no memory for another pool, see {flag}: {error}", flag=flag) from None

    async def take_host(self, num_bytes: int) -> SharedMemoryArena | None:
        """A host tier's; None of no bytes. Raises OutOfPools."""
        if not num_bytes:
            return None
        if self._spare_hosts:
            return self._spare_hosts.pop()
        flag = "--num-host-blocks" if self._config.num_host_blocks else "--host-memory"
        try:
            return await in_thread(self._memory.allocate_host, num_bytes)
        except OutOfMemory as error:
            raise OutOfPools(f"no memory for another pool's host tier, see {flag}: {error}", flag=flag) from None

    def drop(self, arena: Arena) -> None:
        """Closes an arena that no pool has used. Nothing of it is kept."""
        if self._directory is not None and isinstance(arena, KeptArena):
            self._directory.remove_arena(arena)
        arena.close()

    def close(self, *, keep: bool) -> None:
        """Gives the spare arenas back. keep: their files stay in the folder."""
        for arena in (*self._spare, *self._spare_hosts):
            if keep:
                arena.close()
            else:
                self.drop(arena)
        self._spare.clear()
        self._spare_hosts.clear()

    async def _require(self, num_bytes: int, num_host_bytes: int) -> None:
        """Waits for memory of a device that an earlier run's engines have mapped, or that the driver takes back. See Memory."""
        deadline = self._now() + self._config.device_wait
        has_warned = False
        while True:
            try:
                return self._memory.require(num_bytes, num_host_bytes)
            except OutOfMemory as error:
                if not error.on_device or self._now() >= deadline:
                    raise
                if not has_warned:
                    log.warning("waiting_for_device_memory", why=str(error), seconds=self._config.device_wait)
                    has_warned = True
            await asyncio.sleep(_LOOK_AGAIN)
