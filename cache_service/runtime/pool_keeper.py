"""PoolKeeper: one pool whose memory outlives the service.

Owns when the index is written down, and when the quarantine of earlier runs ends. A block that loses its place in the index is
forgotten by the core at once. What is added waits for a moment, so that many blocks are written in one go, after the answers:
a service that is killed loses what it has published in that moment, and nothing else. The quarantine ends once the kernel says
that no process of an earlier run maps the memory.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from ..core.manager import PoolManager
from ..memory.kept_file import KeptPool
from .turns import PAUSE

log = structlog.get_logger()

_WRITE_AFTER = 0.05  # seconds
_LOOK_AFTER = 0.05  # seconds
_SLICE_BLOCKS = 1024  # written in about half a millisecond


class PoolKeeper:
    """Keeps the index of one pool in its files."""

    def __init__(self, manager: PoolManager, kept: KeptPool) -> None:
        self.is_quarantining = False
        self._manager = manager
        self._kept = kept
        self._loop = asyncio.get_running_loop()
        self._writing: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._end_quarantine: Callable[[], None] = lambda: None

    async def restore(self) -> None:
        """Takes over what earlier runs have left. Before the pool serves anybody."""
        begin = time.perf_counter()
        self.is_quarantining = self._kept.may_be_written()
        result = await asyncio.to_thread(
            self._manager.restore, self._kept.index.kept, may_still_write=self.is_quarantining, on_behind=self._write_soon
        )
        log.info(
            "pool_restored",
            model_id=self._kept.spec.model_id,
            num_blocks=result.num_blocks,
            num_dropped_blocks=result.num_dropped,
            num_quarantined_blocks=result.num_quarantined,
            milliseconds=round((time.perf_counter() - begin) * 1e3, 1),
        )

    async def start(self) -> None:
        """The index of a new pool is written down from now on."""
        await asyncio.to_thread(self._manager.restore, self._kept.index.kept, may_still_write=False, on_behind=self._write_soon)

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
        self.is_quarantining = False
        self._end_quarantine()

    def write_all(self) -> None:
        """Writes down all that the index has."""
        while self._manager.write_record(_SLICE_BLOCKS):
            pass

    def close(self, *, remove: bool) -> None:
        """Gives up the files; remove: they go."""
        for timer in (self._writing, self._looking):
            if timer is not None:
                timer.cancel()
        if remove:
            self._kept.remove()
        self._kept.close()

    def _write_soon(self) -> None:
        self._writing = self._loop.call_later(_WRITE_AFTER, self._write_some)

    def _write_some(self) -> None:
        self._writing = None
        if self._manager.write_record(_SLICE_BLOCKS):
            self._writing = self._loop.call_later(PAUSE, self._write_some)
