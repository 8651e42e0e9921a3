"""WatchEvents: carries what event_feed.py tells from the pools to the readers.

Owns how many watches there are, and when the feeds work: a little after a change, so that the reply of the step that made it
goes first and changes made together are told together, and in slices of about a millisecond with a rest behind each, so that
steps pass between them. A watch ends with its session, when the service drains, and when its reader falls behind; whatever
its reader does, nobody waits for it.
"""

import asyncio
from collections.abc import AsyncIterator

import structlog

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..core.index.event_feed import Event, EventFeed, Watch
from ..core.values.errors import BrokenInvariant, CacheError, OutOfWatches, WatchLagged
from ..core.values.types import EventKind
from ..runtime.pool_registry import Pool
from ..runtime.session_manager import LiveSession
from .convert import sequences as convert

log = structlog.get_logger()

MAX_WATCHES = 64
_SLICE_BLOCKS = 400  # about a millisecond
_REST_S = 0.001
_LINGER_S = 0.002


class WatchDesk:
    """Opens watches; one feed for each pool that somebody watches."""

    def __init__(self) -> None:
        self._num_open = 0  # calls that have not ended, also those whose reader takes nothing any more
        self._pumps: dict[Pool, _Pump] = {}

    def tell_replaced(self, replaced: pb.PoolInfo) -> None:
        """All watches hear that an idle pool made room. It has none of its own any more: they ended with its sessions."""
        for pump in self._pumps.values():
            pump.tell_all(Event(EventKind.POOL_REPLACED, replaced_model_id=replaced.spec.model_id))

    async def watch(self, live: LiveSession, tenant: str) -> AsyncIterator[pb.WatchEventsResponse]:
        """The messages of one watch, until it is ended. Raises OutOfWatches, WatchLagged, and what its session ends with."""
        if self._num_open >= MAX_WATCHES:
            raise OutOfWatches(f"all {MAX_WATCHES} watches are in use", limit=MAX_WATCHES)
        self._num_open += 1
        pump = self._pumps.get(live.pool)
        if pump is None:
            pump = self._pumps[live.pool] = _Pump(live.pool)
        reader = pump.add(tenant)
        live.watches.add(reader)
        try:
            while True:
                yield await reader.next()
        finally:
            self._num_open -= 1
            live.watches.discard(reader)
            pump.remove(reader)
            if not pump.readers and self._pumps.get(live.pool) is pump:
                del self._pumps[live.pool]


class WatchReader:
    """One call of WatchEvents."""

    def __init__(self, pump: "_Pump", watch: Watch) -> None:
        self.watch = watch
        self._pump = pump
        self._revision = 0
        self._error: CacheError | None = None
        self._news = asyncio.Event()

    def end(self, error: CacheError) -> None:
        """Ends the watch with this refusal, at once as far as the service is concerned; what was not sent is dropped."""
        self._error = self._error or error
        self._pump.remove(self)
        self._news.set()

    def tell(self) -> None:
        """There may be something to read."""
        self._news.set()

    async def next(self) -> pb.WatchEventsResponse:
        """Raises what the watch was ended with."""
        while self._error is None:
            self._news.clear()
            event = self.watch.take_event()
            if self.watch.wants_snapshot:  # there is room for more of it
                self._pump.wake()
            if event is not None:
                self._revision += 1
                return convert.watch_event(event, self._revision)
            await self._news.wait()
        raise self._error


class _Pump:
    """The feed of one pool and its readers."""

    def __init__(self, pool: Pool) -> None:
        self.readers: list[WatchReader] = []
        self._pool = pool
        self._turn_to_come: asyncio.TimerHandle | None = None
        tables = pool.manager.tables
        self._feed = EventFeed(tables.index, pool.key, pool.manager.pressure, self.wake)

    def add(self, tenant: str) -> WatchReader:
        reader = WatchReader(self, self._feed.open(tenant))
        self.readers.append(reader)
        self._pool.num_watches += 1
        self.wake()
        return reader

    def remove(self, reader: WatchReader) -> None:
        """Idempotent."""
        if reader in self.readers:
            self.readers.remove(reader)
            self._feed.close(reader.watch)
            self._pool.num_watches -= 1
        if not self.readers and self._turn_to_come is not None:
            self._turn_to_come.cancel()

    def tell_all(self, event: Event) -> None:
        self._feed.tell_all(event)
        self.wake()

    def wake(self) -> None:
        self._work_in(_LINGER_S)

    def _work_in(self, seconds: float) -> None:
        if self._turn_to_come is None:
            self._turn_to_come = asyncio.get_running_loop().call_later(seconds, self._turn)

    def _turn(self) -> None:
        self._turn_to_come = None
        try:
            is_more = self._feed.advance(_SLICE_BLOCKS)
        except Exception:
            log.exception("broken_invariant", method="WatchEvents")
            for reader in list(self.readers):
                reader.end(BrokenInvariant("the service found itself inconsistent; its log says more"))
            return
        for reader in list(self.readers):
            if reader.watch.is_lagging:
                self._pool.num_lagged_watches += 1
                reader.end(WatchLagged("the reader fell behind; watch again, from a snapshot"))
            else:
                reader.tell()
        if is_more and self.readers:
            self._work_in(_REST_S)
