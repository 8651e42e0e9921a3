"""A running pool: the core of one KV spec, the memory of its blocks, and work in slices between calls.

A slice takes about a millisecond. Calls pass between two slices, so long work delays no step by more than that.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from kvkeeper.common.service.threads import in_thread_or_here

from ..core.calls.restore import EARLIER_RUN
from ..core.manager import PoolManager
from ..core.values.copies import Copies
from ..core.values.kv_spec import KvSpec
from ..core.values.pool_config import PoolConfig
from ..core.values.step_columns import MAX_STEP_ITEMS
from ..core.values.types import SessionId
from ..memory.arena import Arena, ByteArray
from ..memory.host_packing import HostPacking
from ..memory.shared_memory import SharedMemoryArena
from .pool_keeper import PoolKeeper
from .pool_tier import PoolTier
from .turns import PAUSE, Turns

log = structlog.get_logger()

_MAX_INLINE_COPY_BYTES = 4 << 20  # about a millisecond
_PACKING_COST = 16  # a block that is packed on its way takes as long as so many that are copied
_SLICE_BLOCKS = 1024  # published in about a millisecond
_SLICE_ORDERS = 512  # transfer orders whose end is handled in about a millisecond


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """Sizes and limits of a pool. num_blocks and num_host_blocks count the null block of their tier."""

    num_blocks: int
    block_size: int
    block_bytes: int
    arena_bytes: int
    max_sequences: int
    max_step_items: int
    max_tokens_per_sequence: int
    max_tokens_with_retention: int
    spec: KvSpec
    eviction_policy: str
    prefix_caching: bool
    num_host_blocks: int
    host_arena_bytes: int
    num_disk_blocks: int  # slots
    has_remote: bool
    host_kv_dtype: str  # as in KvSpec
    host_block_bytes: int
    arena_kind: str  # as the attach socket's line names it


PoolTierMaker = Callable[[PoolManager, ByteArray], PoolTier]


class Pool:
    """One KV spec's core and memory. The sets name the sessions that keep the pool from making room for another spec."""

    def __init__(
        self,
        spec: KvSpec,
        config: PoolConfig,
        manager: PoolManager,
        arena: Arena,
        host_arena: SharedMemoryArena | None = None,
        keeper: PoolKeeper | None = None,
        disk: PoolTierMaker | None = None,
        remote: PoolTierMaker | None = None,
        further_arenas: Sequence[Arena] = (),
    ) -> None:
        """arena: of the first rank; further_arenas: of the others, in their order.

        keeper: of a pool whose memory outlives the service, with what earlier runs have left taken over.

        disk, remote: make what runs the orders of the core's tiers of these names, where it has them.
        """
        self.key = spec.key
        self.manager = manager
        self.arena = arena
        self.arenas: tuple[Arena, ...] = (arena, *further_arenas)  # by rank
        self.host_arena = host_arena
        self.hosts: ByteArray | None = None  # [num_host_blocks, stored_bytes]: of each block the shares of all ranks
        if host_arena is not None:
            self.hosts = host_arena.blocks(config.num_host_blocks, spec.stored_bytes)
        self._packing = HostPacking(spec) if spec.host_kv_dtype else None
        self._copy_bytes = spec.num_ranks * spec.block_bytes * (_PACKING_COST if self._packing is not None else 1)
        self.info = _make_info(spec, config, manager, str(arena.fields()["kind"]))
        self.sessions: set[SessionId] = set()
        self.mappings: set[SessionId] = set()  # sessions, live or ended, whose process still maps the arena
        self.quarantines: set[SessionId] = set()  # sessions that ended and may still write
        self.last_use = 0
        self.num_watches = 0
        self.num_lagged_watches = 0  # ended because their reader fell behind, over the pool's life
        self.copying: asyncio.Task[None] | None = None  # large copies in a thread; no block is granted until they are done
        self.keeper = keeper
        self._is_publishing = self._is_reclaiming = False
        self.disk, self.remote = self._made(disk), self._made(remote)
        if keeper is not None:
            keeper.copying = lambda: self.copying
        if keeper is not None and keeper.is_quarantining:
            self.quarantines.add(EARLIER_RUN)
            keeper.watch_earlier(self._end_earlier_quarantine)

    def _made(self, maker: PoolTierMaker | None) -> PoolTier | None:
        if maker is None:
            return None
        assert self.hosts is not None, "such a tier lies behind a host tier"
        return maker(self.manager, self.hosts)

    @property
    def is_on_device(self) -> bool:
        """Whether its blocks are in CUDA memory."""
        return self.info.arena_kind != "memfd"

    @property
    def is_idle(self) -> bool:
        return not (self.sessions or self.mappings or self.quarantines)

    async def published(self) -> None:
        """Publishes what steps have committed until now, slice by slice; so that counts reported after it include it."""
        turns = Turns()
        while self.manager.maintenance.publish_pending(_SLICE_BLOCKS):
            await turns.offer()
        if self.keeper is not None:
            await self.keeper.written()

    def copy(self, copies: Copies) -> Awaitable[None] | None:
        """Runs a call's copies, in order; awaitable when they are large, so that only this pool waits for them.

        All copies on a device count as large: each waits for its end there, and for the turns of what engines compute. Large
        copies are a task of the service, not of the call, and go on when the call is cancelled. Until they are done a
        granted block could be one of their sources, so a call that grants blocks of this pool awaits `copying` first.
        """
        if not len(copies) or (not self.is_on_device and len(copies) * self._copy_bytes <= _MAX_INLINE_COPY_BYTES):
            self._copy_all_ranks(copies)
            return None
        self.copying = asyncio.create_task(self._copy_in_thread(copies))
        return asyncio.shield(self.copying)

    async def _copy_in_thread(self, copies: Copies) -> None:
        try:
            await in_thread_or_here(self._copy_all_ranks, copies)
        finally:
            self.copying = None

    def _copy_all_ranks(self, copies: Copies) -> None:
        for rank, arena in enumerate(self.arenas):
            arena.copy(copies, self.info.block_bytes, self._get_host_memory(rank), self._packing)

    def _get_host_memory(self, rank: int) -> ByteArray | None:
        """[num_host_blocks, host_block_bytes]: the rank's share of the host tier."""
        return None if self.hosts is None else self.hosts.reshape(len(self.hosts), len(self.arenas), -1)[:, rank]

    def publish_soon(self) -> None:
        """Publishes what steps committed, slice by slice, once the reply being made is on its way.

        Then cached blocks are evicted that are above the configured share, or that the next steps may want, so that these find
        free blocks.
        """
        if not self._is_publishing:
            self._is_publishing = True
            asyncio.get_running_loop().call_soon(self._publish_slice)

    def publish_some(self) -> None:
        """The same after a reply was sent: the first slice at once."""
        if not self._is_publishing:
            self._publish_slice()

    def reclaim_soon(self) -> None:
        """Reclaims, slice by slice, the remains of sessions that ended."""
        if self.manager.reclaim.is_left and not self._is_reclaiming:
            self._is_reclaiming = True
            asyncio.get_running_loop().call_later(PAUSE, self._reclaim_slice)

    def _publish_slice(self) -> None:
        is_left = self.manager.maintenance.publish_pending(_SLICE_BLOCKS) or self.manager.maintenance.end_reported_orders(
            _SLICE_ORDERS
        )
        if not is_left:
            num_evicted = self.manager.evictions.evict_excess(_SLICE_BLOCKS) + self.manager.evictions.evict_ahead(_SLICE_BLOCKS)
            is_left = num_evicted >= _SLICE_BLOCKS
        self._is_publishing = is_left
        if self._is_publishing:
            asyncio.get_running_loop().call_later(PAUSE, self._publish_slice)

    def _reclaim_slice(self) -> None:
        self._is_reclaiming = self.manager.sessions.reclaim_blocks(_SLICE_BLOCKS)
        if self._is_reclaiming:
            asyncio.get_running_loop().call_later(PAUSE, self._reclaim_slice)

    def arena_fields(self, rank: int, *, read_only: bool = False) -> dict[str, object]:
        """How the attach socket describes the pool's memory to a rank."""
        fields = {**self.arenas[rank].fields(), "num_bytes": self.info.arena_bytes} | ({"read_only": True} if read_only else {})
        return {**fields, "num_host_bytes": self.info.host_arena_bytes} if self.host_arena is not None else fields

    def arena_descriptors(self, rank: int, *, read_only: bool = False) -> list[int]:
        """The descriptors that the attach socket hands over with that. read_only: of shared memory, for what must not write."""
        arenas = (self.arenas[rank],) if self.host_arena is None else (self.arenas[rank], self.host_arena)
        if not read_only:
            return [descriptor for arena in arenas for descriptor in arena.descriptors()]
        return [arena.read_only_descriptor for arena in arenas if isinstance(arena, SharedMemoryArena)]

    def _end_earlier_quarantine(self) -> None:
        num_blocks = self.manager.sessions.end_quarantine(EARLIER_RUN)
        self.quarantines.discard(EARLIER_RUN)
        log.info("quarantine_ended", client_name=EARLIER_RUN, num_blocks=num_blocks)

    async def close_tiers(self) -> None:
        """Closes those below the host tier, which may wait for a disk or a server, while other pools go on."""
        tiers = [tier for tier in (self.disk, self.remote) if tier is not None]
        self.disk = self.remote = None
        for tier in tiers:
            tier.stop()
        await asyncio.gather(*(in_thread_or_here(tier.close) for tier in tiers))

    def close(self, *, keep: bool = False) -> None:
        """Gives the memory back; keep: where it outlives the service, it stays for the next one."""
        for tier in (self.disk, self.remote):
            if tier is not None:
                tier.stop()
                tier.close()
        if self.keeper is not None:
            if keep:
                self.manager.maintenance.publish_pending()
                while self.manager.maintenance.end_reported_orders(_SLICE_ORDERS):
                    pass
                self.keeper.write_all()
            self.keeper.close(remove=not keep)
        for arena in self.arenas:
            arena.close(is_mapped=bool(self.mappings))
        if self.host_arena is not None:
            self.host_arena.close()


def _make_info(spec: KvSpec, config: PoolConfig, manager: PoolManager, arena_kind: str) -> PoolInfo:
    num_host_blocks = config.num_host_blocks
    return PoolInfo(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        block_bytes=spec.block_bytes,
        arena_bytes=config.num_blocks * spec.block_bytes,
        max_sequences=config.max_sequences,
        max_step_items=MAX_STEP_ITEMS,
        max_tokens_per_sequence=config.limit_tokens,
        max_tokens_with_retention=config.max_tokens_per_sequence,
        spec=spec,
        eviction_policy=config.eviction_policy,
        prefix_caching=config.prefix_caching,
        num_host_blocks=num_host_blocks,
        host_arena_bytes=num_host_blocks * spec.stored_bytes,
        num_disk_blocks=manager.disk.directory.num_slots if manager.disk is not None else 0,
        has_remote=manager.remote is not None,
        host_kv_dtype=spec.host_kv_dtype if num_host_blocks else "",
        host_block_bytes=spec.host_block_bytes if num_host_blocks else 0,
        arena_kind=arena_kind,
    )
