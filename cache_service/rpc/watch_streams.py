"""WatchEvents: carries the events of the pools' feeds to the readers.

Owns the number of watches, and when the feeds work. A feed works a little after a change, so that the reply of the step goes
first and changes made together are reported together. It works in slices of about a millisecond with a rest after each, so that
steps pass between them. A watch ends with its session, when the service drains, and when its reader falls behind; a slow reader
delays nothing else.
"""

import asyncio
from collections.abc import AsyncIterator

import structlog

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..core.index.events.event_feed import EventFeed
from ..core.index.events.watch import Event, Watch
from ..core.values.errors import BrokenInvariant, CacheError, OutOfWatches, WatchLagged
from ..core.values.types import EventKind
from ..runtime.live_session import LiveSession
from ..runtime.pool import Pool, PoolInfo
from .convert.reports import watch_event

log = structlog.get_logger()

MAX_WATCHES = 64
_SLICE_BLOCKS = 400  # about a millisecond
_REST_S = 0.001
_LINGER_S = 0.002


class WatchStreams:
    """Opens watches; keeps one feed for each pool that is watched."""

    def __init__(self) -> None:
        self._num_open = 0  # calls that have not ended, including those whose reader has stopped reading
        self._feeds: dict[Pool, _PoolFeed] = {}

    def note_replaced(self, replaced: PoolInfo) -> None:
        """All watches get an event: an idle pool made room. The pool has no watches: they ended with its sessions."""
        for feed in self._feeds.values():
            feed.notify_all(Event(EventKind.POOL_REPLACED, replaced_model_id=replaced.spec.model_id))

    async def watch(
        self, live: LiveSession, scope: str, *, wants_tokens: bool = False
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        """The messages of one watch until it ends. Raises OutOfWatches, WatchLagged, and the error of the session's end."""
        if self._num_open >= MAX_WATCHES:
            raise OutOfWatches(f"all {MAX_WATCHES} watches are in use", limit=MAX_WATCHES)
        feed = self._feeds.get(live.pool)
        if feed is None:
            feed = self._feeds[live.pool] = _PoolFeed(live.pool)
        try:
            reader = feed.add(scope, wants_tokens=wants_tokens)
        except BaseException:
            self._drop_unread(live.pool, feed)
            raise
        self._num_open += 1
        live.watches.add(reader)
        try:
            while True:
                yield await reader.next_message()
        finally:
            self._num_open -= 1
            live.watches.discard(reader)
            feed.remove(reader)
            self._drop_unread(live.pool, feed)

    def _drop_unread(self, pool: Pool, feed: "_PoolFeed") -> None:
        """Forgets the feed of a pool where it has no readers."""
        if not feed.readers and self._feeds.get(pool) is feed:
            del self._feeds[pool]


class WatchReader:
    """One call of WatchEvents: its place in the feed, and the messages it has not read."""

    def __init__(self, feed: "_PoolFeed", watch: Watch) -> None:
        self.watch = watch
        self._feed = feed
        self._revision = 0
        self._error: CacheError | None = None
        self._wake_up = asyncio.Event()

    def end_with(self, error: CacheError) -> None:
        """Ends the watch with this error. For the service it ends at once; messages that were not sent are dropped."""
        self._error = self._error or error
        self._feed.remove(self)
        self._wake_up.set()

    def wake(self) -> None:
        """There may be a message to read."""
        self._wake_up.set()

    async def next_message(self) -> pb.WatchEventsResponse:
        """Raises the error that the watch was ended with."""
        while self._error is None:
            self._wake_up.clear()
            event = self.watch.take_event()
            if self.watch.wants_snapshot:  # it has room for more of the snapshot
                self._feed.wake()
            if event is not None:
                self._revision += 1
                return watch_event(event, self._revision)
            await self._wake_up.wait()
        raise self._error


class _PoolFeed:
    """The feed of one pool, its readers, and the timer of its next slice."""

    def __init__(self, pool: Pool) -> None:
        self.readers: list[WatchReader] = []
        self._pool = pool
        self._next_slice: asyncio.TimerHandle | None = None
        state = pool.manager.state
        self._feed = EventFeed(state.index, pool.key, pool.manager.state.gauge.level, self.wake, below=state.below_blocks)

    def add(self, scope: str, *, wants_tokens: bool) -> WatchReader:
        reader = WatchReader(self, self._feed.open(scope, wants_tokens=wants_tokens))
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
        if not self.readers and self._next_slice is not None:
            self._next_slice.cancel()

    def notify_all(self, event: Event) -> None:
        self._feed.notify_all(event)
        self.wake()

    def wake(self) -> None:
        self._run_slice_in(_LINGER_S)

    def _run_slice_in(self, seconds: float) -> None:
        if self._next_slice is None:
            self._next_slice = asyncio.get_running_loop().call_later(seconds, self._run_slice)

    def _run_slice(self) -> None:
        self._next_slice = None
        try:
            is_more = self._feed.advance(_SLICE_BLOCKS)
        except Exception:
            log.exception("broken_invariant", method="WatchEvents")
            for reader in list(self.readers):
                reader.end_with(BrokenInvariant("the service found itself inconsistent; its log says more"))
            return
        for reader in list(self.readers):
            if reader.watch.is_lagging:
                self._pool.num_lagged_watches += 1
                reader.end_with(WatchLagged("the reader fell behind; watch again, starting from a snapshot"))
            else:
                reader.wake()
        if is_more and self.readers:
            self._run_slice_in(_REST_S)
