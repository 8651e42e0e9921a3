"""The one owner of the core: sessions on their pools, what ends them, and what their end leaves behind.

Everything here is synchronous but opening a session, and runs on one event loop, so the core needs no locks. Rules: a session
is renewed by messages only; when it ends by itself (lease, grace, death of its process) or by CloseSession, its sequences
are reclaimed at once, and what it may still write stays in quarantine until its mapping and running copies are gone, or
until it says that it has drained. What ends by itself ends by the clock that is handed in, which does not count time in which
this service could not hear anybody. Knows nothing of gRPC.
"""

import asyncio
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from ..core.calls.sessions import CloseResult
from ..core.values.errors import CacheError, Draining, StaleEpoch, UnknownSession
from ..core.values.kv_spec import KvSpec
from ..core.values.types import Executor, SessionId
from ..memory.attach_server import AttachRefused, Grant
from .clock import Clock, TimerHandle
from .lease import Session, SessionTable
from .pool import Pool
from .pool_registry import PoolRegistry

log = structlog.get_logger()

MIN_TTL = 0.5  # seconds
DEFAULT_TTL = 10.0
MAX_TTL = 60.0
MAX_UNATTACHED_TTL = 3600.0
_MAX_REMEMBERED = 4096  # ended sessions whose CloseSession may come again
_TICK = 1.0  # seconds between two looks at what falls due by itself in the pools
_BETWEEN_SLICES = 0.01  # while a look left something to do


class Stream(Protocol):
    """A call of a session that lasts: the one that it steps on, or one that tells it events."""

    def end(self, error: CacheError) -> None:
        """Ends it from outside, with this refusal."""


@dataclass(slots=True, eq=False)
class LiveSession:
    """A session with what the core does not know of it."""

    core: Session
    pool: Pool
    attach_token: str
    stream: Stream | None = None
    is_mapped: bool = False  # its process maps the arena, also after the session's end
    over: asyncio.Event = field(default_factory=asyncio.Event)
    watches: set[Stream] = field(default_factory=set)  # calls of WatchEvents, which end with the session


@dataclass(slots=True)
class _Ended:
    """What is remembered of a session that ended; live only while it holds a quarantine."""

    epoch: int
    live: LiveSession | None
    drained: bool


class SessionManager:
    """Sessions and pools of one service."""

    def __init__(self, registry: PoolRegistry, clock: Clock, epoch: int, max_sessions: int) -> None:
        self.registry = registry
        self.table = SessionTable(epoch, max_sessions)
        self.epoch = epoch
        self.is_draining = False
        self.num_opened = 0
        self.num_reaped = 0
        self.no_session = asyncio.Event()  # set while there is none
        self.no_session.set()
        self._clock = clock
        self._live: dict[SessionId, LiveSession] = {}
        self._tokens: dict[str, LiveSession] = {}
        self._ended: OrderedDict[SessionId, _Ended] = OrderedDict()
        self._timer: TimerHandle | None = None
        self._timer_deadline = float("inf")
        self._ticker: TimerHandle | None = None  # while there is a pool

    def now(self) -> float:
        return self._clock.time()

    @property
    def sessions(self) -> list[LiveSession]:
        return list(self._live.values())

    async def open(self, spec: KvSpec, executor: Executor, ttl: float, client_name: str) -> LiveSession:
        """Raises Draining, PoolNotReady, OutOfPools, OutOfSessions."""
        if self.is_draining:
            raise Draining("the service is stopping")
        self.table.check_room()  # a refusal leaves no pool behind, and costs nobody theirs
        pool = await self.registry.obtain(spec)
        session_id = SessionId(secrets.token_hex(16))
        core = self.table.open(session_id, executor, ttl, client_name, self.now())
        pool.manager.tick(self.now())
        pool.manager.open_session(session_id, executor)
        live = LiveSession(core, pool, secrets.token_hex(16))
        pool.sessions.add(session_id)
        self._live[session_id] = live
        self._tokens[live.attach_token] = live
        self.no_session.clear()
        self.num_opened += 1
        self._watch_deadlines()
        if self._ticker is None:
            self._ticker = self._clock.call_at(self.now() + _TICK, self._tick)
        log.info("session_opened", client_name=client_name, executor=executor.value, ttl=ttl)
        return live

    def require(self, session_id: str, epoch: int, *, published: bool = True) -> LiveSession:
        """The session of a message, renewed by it, with its pool's clock set. Raises UnknownSession, StaleEpoch.

        By default what is asked next sees all in the index that steps have committed.
        """
        now = self._clock.time()
        core = self.table.require(SessionId(session_id), epoch, now)
        self.table.renew(core, now)
        live = self._live[core.id]
        live.pool.manager.tick(now)
        if published:
            live.pool.manager.publish_pending()
        return live

    def close(self, session_id: str, epoch: int, *, drained: bool) -> CloseResult:
        """Ends a session; drained also ends what quarantine an ended one left. Idempotent with drained.

        Raises UnknownSession, StaleEpoch.
        """
        self._reap()  # whatever is due, so that it is either live or ended
        ended = self._ended.get(SessionId(session_id))
        if ended is None or not drained:
            return self._end(self.require(session_id, epoch), "closed", drained=drained)
        if epoch != ended.epoch:
            raise StaleEpoch("the epoch is not the session's", current_epoch=self.table.epoch)
        ended.drained = True
        self._settle(ended)
        return CloseResult(0, 0)

    def take_stream(self, live: LiveSession, stream: Stream, replaced: CacheError) -> None:
        """From now on the session steps on this stream; the one before ends."""
        if live.stream is not None:
            live.stream.end(replaced)
        live.stream = stream

    def lose_stream(self, live: LiveSession, stream: Stream, *, with_grace: bool) -> None:
        """The stream is over. Where its client went away, the session has a short grace to come back."""
        if live.stream is stream:
            live.stream = None
            if with_grace:
                self.table.start_grace(live.core, self._clock.time())
                self._watch_deadlines()

    def redeem(self, token: str) -> Grant:
        """See arena.attach.AttachDesk."""
        live = self._tokens.get(token)
        if live is None:
            raise AttachRefused("UNKNOWN_TOKEN")
        if live.core.ttl > MAX_TTL:
            raise AttachRefused("LEASE_TOO_LONG")
        del self._tokens[token]
        live.is_mapped = True
        live.pool.mappings.add(live.core.id)
        log.info("process_attached", client_name=live.core.client_name)
        return Grant(
            fields=live.pool.arena_fields(),
            descriptors=live.pool.arena_descriptors(),
            on_process_end=lambda: self._process_ended(live),
            on_unmapped=lambda: self._unmapped(live),
            session_over=live.over,
        )

    def start_draining(self) -> None:
        """From now on no session and no watch is opened; the watches end, sessions go on."""
        self.is_draining = True
        for live in self.sessions:
            for watch in list(live.watches):
                watch.end(Draining("the service is stopping"))

    def stop(self) -> None:
        """Ends the streams and forgets the timers; sessions end with the process."""
        self._stop_timer()
        if self._ticker is not None:
            self._ticker.cancel()
        for live in self.sessions:
            if live.stream is not None:
                live.stream.end(Draining("the service is stopping"))

    def _end(self, live: LiveSession, cause: str, *, drained: bool = False) -> CloseResult:
        session_id = live.core.id
        # Copies that still run in a thread write as an attached process would: their destinations must not be reused yet.
        copying = live.pool.copying
        may_still_write = copying is not None or (live.is_mapped and not drained)
        self.table.end(live.core)
        live.pool.manager.tick(self.now())
        result = live.pool.manager.close_session(session_id, may_still_write=may_still_write)
        live.pool.reclaim_soon()
        del self._live[session_id]
        self._tokens.pop(live.attach_token, None)
        live.pool.sessions.discard(session_id)
        ended = self._ended[session_id] = _Ended(live.core.epoch, live if may_still_write else None, drained)
        if may_still_write:
            live.pool.quarantines.add(session_id)
            if copying is not None:
                self._settle(ended)  # when they are done
        self._forget_oldest()
        if live.stream is not None:
            live.stream.end(UnknownSession("the session has ended"))
            live.stream = None
        for watch in list(live.watches):
            watch.end(UnknownSession("the session has ended"))
        live.over.set()
        if not self._live:
            self.no_session.set()
        if cause != "closed":
            self.num_reaped += 1
        log.info(
            "session_ended",
            cause=cause,
            client_name=live.core.client_name,
            num_released_sequences=result.num_released_sequences,
            num_quarantined_blocks=result.num_quarantined_blocks,
        )
        return result

    def _process_ended(self, live: LiveSession) -> None:
        if not live.over.is_set():
            self._end(live, "process ended")

    def _unmapped(self, live: LiveSession) -> None:
        live.is_mapped = False
        live.pool.mappings.discard(live.core.id)
        ended = self._ended.get(live.core.id)
        if ended is not None:
            self._settle(ended)

    def _settle(self, ended: _Ended) -> None:
        """Ends the quarantine of an ended session when nothing of it can write any more."""
        live = ended.live
        if live is None or (live.is_mapped and not ended.drained):
            return
        if live.pool.copying is not None:  # perhaps others that began since: whoever waited for the first was told first
            live.pool.copying.add_done_callback(lambda _: self._settle(ended))
            return
        ended.live = None
        num_blocks = live.pool.manager.end_quarantine(live.core.id)
        live.pool.quarantines.discard(live.core.id)
        log.info("quarantine_ended", client_name=live.core.client_name, num_blocks=num_blocks)

    def _forget_oldest(self) -> None:
        for session_id in list(self._ended)[: max(0, len(self._ended) - _MAX_REMEMBERED)]:
            if self._ended[session_id].live is None:
                del self._ended[session_id]

    def _watch_deadlines(self) -> None:
        """Wakes at the next deadline. Renewals only move deadlines away, so they need not come here."""
        deadline = self.table.next_deadline()
        if deadline is None or deadline >= self._timer_deadline:
            return
        self._stop_timer()
        self._timer_deadline = deadline
        self._timer = self._clock.call_at(deadline, self._reap)

    def _reap(self) -> None:
        self._stop_timer()
        for core in self.table.expired(self._clock.time()):
            self._end(self._live[core.id], "expired")
        self._watch_deadlines()

    def _tick(self) -> None:
        """Lets what fell due in the pools happen, once a second while there is a pool."""
        now, self._ticker = self.now(), None
        is_left = False
        for pool in self.registry.pools:
            pool.manager.tick(now)
            is_left |= pool.manager.do_due_work()
        if self.registry.pools:
            self._ticker = self._clock.call_at(now + (_BETWEEN_SLICES if is_left else _TICK), self._tick)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_deadline = None, float("inf")
