"""PoolKeeper: one pool whose memory outlives the service.

Owns when the index is written down, and when the quarantine of earlier runs ends. A block that loses its place in the index is
forgotten by the core at once. What is added waits for a moment, so that many blocks are written in one go, after the answers:
a service that is killed loses what it has published in that moment, and nothing else. While this process copies blocks in a
thread nothing is written, because what the index has may be what the copies fill. Digests of many bytes are made in a thread,
and count for the blocks that are still their nodes' then. The quarantine ends once the kernel says that no process of an
earlier run maps the memory. A tenant's name that finds no room, or another scope, is stored once there is some.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from kvkeeper.common.service.threads import in_thread, in_thread_or_here

from ..core.calls.restore import RestoreResult
from ..core.index.index_record import Unwritten
from ..core.manager import PoolManager
from ..core.values.kept_index import Verification
from ..memory.kept.kept_pool import BlockDigests, KeptPool
from .turns import PAUSE, Turns

log = structlog.get_logger()

_WRITE_AFTER = 0.05  # seconds
_LOOK_AFTER = 0.05  # seconds
_NAMES_AFTER = 0.5  # seconds
_SLICE_BLOCKS = 1024  # written in about half a millisecond
_INLINE_BYTES = 1 << 20  # digested in about a third of a millisecond
_SLICE_BYTES = 32 << 20  # digested in a thread in about ten


class PoolKeeper:
    """Keeps the index of one pool in its files."""

    def __init__(self, manager: PoolManager, kept: KeptPool, digests: BlockDigests | None = None, quiet: float = 0.0) -> None:
        """digests: rows get one of their block's content. quiet: seconds that a device may go on for a process that ended."""
        self._quiet = quiet
        self._quiet_at: float | None = None  # from when on nothing of an earlier run is running, once none maps the memory
        self.is_quarantining = False
        self.copying: Callable[[], asyncio.Task[None] | None] = lambda: None  # a copy of blocks in a thread; set by the pool
        self._manager = manager
        self._kept = kept
        self._digests = digests
        self._loop = asyncio.get_running_loop()
        self._writing: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._naming: asyncio.TimerHandle | None = None
        self._digesting: asyncio.Task[None] | None = None
        self._taken: Unwritten | None = None  # what is being digested
        self._end_quarantine: Callable[[], None] = lambda: None

    async def restore(self, num_verified_blocks: int) -> None:
        """Takes over what earlier runs have left. Before the pool serves a session.

        num_verified_blocks: how many are compared with their digests, where digests are made; 0 for all.
        """
        begin = time.perf_counter()
        self.is_quarantining = self._kept.may_be_written()
        verification = None
        if self._digests is not None:
            verification = Verification(self._digests.of, num_verified_blocks, secrets.randbits(64))
        result = await self._take_over(may_still_write=self.is_quarantining, verification=verification)
        log.info(
            "pool_restored",
            model_id=self._kept.spec.model_id,
            num_blocks=result.num_blocks,
            num_host_blocks=result.num_host_blocks,
            num_dropped_blocks=result.num_dropped,
            num_nameless_tenants=self._kept.device.index.num_nameless,
            num_verified_blocks=result.num_verified,
            num_damaged_blocks=result.num_damaged,
            num_quarantined_blocks=result.num_quarantined,
            num_quarantined_host_blocks=result.num_quarantined_hosts,
            milliseconds=round((time.perf_counter() - begin) * 1e3, 1),
        )

    async def start(self) -> None:
        """The index of a new pool is written down from now on."""
        await self._take_over(may_still_write=False)

    async def _take_over(self, **how: Any) -> RestoreResult:
        kept = replace(self._kept.kept(), note_root=self._note_root)
        return await in_thread(partial(self._manager.restore, kept, on_behind=self._write_soon, **how))

    def _note_root(self, root: int, scope: str) -> bool:
        index = self._kept.device.index
        counts = index.note_root(root, scope)
        if index.num_unstored and self._naming is None:
            log.warning("tenant_not_kept", why="no room for its name: if this run ends before there is, its blocks are lost")
            self._naming = self._loop.call_later(_NAMES_AFTER, self._store_tenants)
        return counts

    def _store_tenants(self) -> None:
        """Stores tenants whose names found no room; tries again and again until they do."""
        self._naming = None
        index = self._kept.device.index
        num_tenants = index.num_unstored
        index.store_scopes()
        if index.num_unstored:
            self._naming = self._loop.call_later(_NAMES_AFTER, self._store_tenants)
        else:
            log.info("tenants_kept", num_tenants=num_tenants)

    def watch_earlier(self, end_quarantine: Callable[[], None]) -> None:
        """end_quarantine is called once no process of an earlier run maps the memory any more; perhaps at once."""
        self._end_quarantine = end_quarantine
        self.look()

    def look(self) -> None:
        """Ends the quarantine of earlier runs if it can end now; else looks again in a moment."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if not self.is_quarantining:
            return
        if self._kept.may_be_written():
            self._looking = self._loop.call_later(_LOOK_AFTER, self.look)
            return
        if self._quiet_at is None:
            self._quiet_at = self._loop.time() + self._quiet
        if self._quiet_at > self._loop.time():
            self._looking = self._loop.call_at(self._quiet_at, self.look)
            return
        self.is_quarantining = False
        self._end_quarantine()

    async def written(self) -> None:
        """Returns once all that the index has is written down."""
        turns = Turns()
        while True:
            busy = self.copying() or self._digesting
            if busy is not None:
                await asyncio.wait([busy])
            elif self._write_slice():
                await turns.offer()
            elif self._digesting is None:
                return

    def write_all(self) -> None:
        """The same at once, except for what copies may fill; at the end of the service."""
        self._kept.device.index.store_scopes()
        if self.copying() is not None:
            return
        if self._digesting is not None and self._taken is not None and self._digests is not None:
            self._digesting.cancel()
            self._manager.record.write_taken(self._taken, self._digests.of(self._taken.tier, self._taken.blocks))
        while self._manager.record.write(_SLICE_BLOCKS, self._digests.of if self._digests is not None else None):
            pass

    def close(self, *, remove: bool) -> None:
        """Gives up the files; remove: they go."""
        for waiting in (self._writing, self._looking, self._naming, self._digesting):
            if waiting is not None:
                waiting.cancel()
        self._digests = None  # it holds views of the arenas
        if remove:
            self._kept.remove()
        self._kept.close()

    def _write_soon(self) -> None:
        self._write_in(_WRITE_AFTER)

    def _write_in(self, seconds: float) -> None:
        if self._writing is None:
            self._writing = self._loop.call_later(seconds, self._write_some)

    def _write_some(self) -> None:
        self._writing = None
        if self.copying() is not None:
            self._write_in(_WRITE_AFTER)
        elif self._digesting is None and self._write_slice():
            self._write_in(PAUSE)

    def _write_slice(self) -> bool:
        """Writes down some of what the record lacks, or has it digested first. Whether more is left to begin with."""
        digests = self._digests
        if digests is None:
            return self._manager.record.write(_SLICE_BLOCKS)
        taken = self._manager.record.take(min(_SLICE_BLOCKS, max(1, _SLICE_BYTES // digests.block_bytes)))
        if len(taken) * digests.block_bytes <= _INLINE_BYTES:
            return self._manager.record.write_taken(taken, digests.of(taken.tier, taken.blocks))
        self._taken = taken
        self._digesting = self._loop.create_task(self._write_digested(digests, taken))
        return False

    async def _write_digested(self, digests: BlockDigests, taken: Unwritten) -> None:
        try:
            made = await in_thread_or_here(digests.of, taken.tier, taken.blocks)
            if self._manager.record.write_taken(taken, made):
                self._write_in(PAUSE)
        finally:
            self._digesting = None
