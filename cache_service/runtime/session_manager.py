"""Sessions on their pools: what opens and renews them, what ends them, and the quarantine that they leave behind.

All calls on the core start here or hold a session from here. They run on one event loop, so the core needs no locks; only
opening a session awaits anything. Rules: only messages renew a session. When a session ends, by CloseSession or by itself
(lease, grace, death of its process), its sequences are reclaimed at once. The blocks that it may still write stay in quarantine
until its mapping and its running copies are gone, and on a device a while longer, or until it says that it has drained. Leases
and graces are timed by the clock that is handed in, which does not count time in which this service could not read messages.
"""

import asyncio
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import structlog

from kvkeeper.trust.caller import ANY_TENANT

from ..core.calls.sessions import CloseResult
from ..core.step.expected import OpenStep
from ..core.step.forecast import Forecast
from ..core.values.errors import CacheError, Draining, InvalidField, NotImplementedYet, StaleEpoch, UnknownSession
from ..core.values.kv_spec import KvSpec
from ..core.values.step_columns import StepBatch
from ..core.values.types import Executor, SessionId
from ..memory.attach_server import AttachRefused, Grant, Part
from .clock import Clock, TimerHandle
from .lease import Session, SessionTable
from .pool import Pool
from .pool_registry import PoolRegistry

log = structlog.get_logger()

MIN_TTL = 0.5  # seconds
DEFAULT_TTL = 10.0
MAX_TTL = 60.0
MAX_UNATTACHED_TTL = 3600.0
_MAX_REMEMBERED = 4096  # ended sessions, so that a repeated CloseSession is answered
_TICK = 1.0  # seconds between two ticks of the pools
_TICK_AGAIN = 0.01  # seconds, after a tick that left work


class CarrierKind(Enum):
    """How the steps of a session come."""

    GRPC = "grpc"
    LANE = "lane"


class Stream(Protocol):
    """A call that answers a session on its own: WatchEvents."""

    def end_with(self, error: CacheError) -> None:
        """Ends it from outside; its client gets this error."""


class ForetoldRequest(Protocol):
    """The request that a session will most likely send next. answer: what it gets if nothing happens in its pool before."""

    step_id: int
    completed_step_id: int
    answer: bytes | None
    num_calls: int

    @property
    def whole(self) -> OpenStep:
        """The step that releases and starts nothing."""

    def is_whole(self, raw: bytes) -> bool:
        """Whether a request is as foretold, and releases and starts nothing."""

    def read_open(self, raw: bytes) -> OpenStep | None:
        """A request that may release and start, as far as its answer needs it; None of one that is not as foretold."""

    def step(self, raw: bytes) -> tuple[StepBatch, Forecast]:
        """Such a request as a whole, and the forecast with its releases."""


class StepCarrier(Protocol):
    """A stream that steps come on."""

    @property
    def kind(self) -> CarrierKind: ...

    def end_with(self, error: CacheError) -> None:
        """Ends it from outside; its client gets this error."""


@dataclass(slots=True, eq=False)
class LiveSession:
    """A session with its pool, its attached processes, one for each rank, and its streams."""

    core: Session
    pool: Pool
    attach_token: str
    tenant: str  # of the caller that opened it, or ANY_TENANT
    read_only_memory: bool  # its process may only read what it maps
    stream: StepCarrier | None = None  # that carried the last step
    lane: StepCarrier | None = None  # the step lane that was handed to its process, until it ends; with or without steps on it
    attached: set[int] = field(default_factory=set)  # ranks that have shown the token
    mapped: set[int] = field(default_factory=set)  # ranks whose process maps its arena, perhaps longer than the session lives
    quiet_at: float = 0.0  # from when on nothing of its processes is at work on a device any more
    over: asyncio.Event = field(default_factory=asyncio.Event)
    foretold: ForetoldRequest | None = None  # its next step, most likely
    watches: set[Stream] = field(default_factory=set)  # calls of WatchEvents; they end with the session

    def may_write(self, now: float) -> bool:
        """Whether a process of it can write to an arena, or a device still does so for one."""
        return (bool(self.mapped) or now < self.quiet_at) and not self.read_only_memory


@dataclass(slots=True)
class _Ended:
    """A session that ended; live is set only while it has a quarantine."""

    epoch: int
    tenant: str
    live: LiveSession | None
    drained: bool


class SessionManager:
    """The live sessions of one service, and the ended ones that it remembers."""

    def __init__(self, registry: PoolRegistry, clock: Clock, epoch: int, max_sessions: int, quiet: float = 0.0) -> None:
        """quiet: seconds that a device may go on with the work of a process that is gone."""
        self.registry = registry
        self._quiet = quiet
        self._quieting: set[TimerHandle] = set()
        self.table = SessionTable(epoch, max_sessions)
        self.epoch = epoch
        self.is_draining = False
        self.num_opened = 0
        self.num_reaped = 0
        self.no_session = asyncio.Event()  # set while no session is live
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

    async def open(
        self,
        spec: KvSpec,
        executor: Executor,
        ttl: float,
        client_name: str,
        tenant: str = ANY_TENANT,
        *,
        read_only_memory: bool = False,
        packs_host_blocks: bool = False,
    ) -> LiveSession:
        """tenant: that its caller acts for. read_only_memory: where a process attaches, it may only read.

        packs_host_blocks: its client converts blocks for a host tier of few bits, where it runs the orders.
        Raises Draining, PoolNotReady, OutOfPools, OutOfSessions, InvalidField, NotImplementedYet.
        """
        if self.is_draining:
            raise Draining("the service is stopping")
        self.table.check_room()  # before a pool is made, or an idle one replaced, for a session that is then refused
        if read_only_memory and self.registry.is_on_device:
            raise InvalidField("read_only_memory: memory on a device can be written, too", field="read_only_memory")
        if executor is Executor.ENGINE and not packs_host_blocks and self.registry.stored(spec).host_kv_dtype:
            text = "the host tier keeps K and V in few bits, which this client does not convert: see --host-kv-dtype"
            raise NotImplementedYet(text, feature="host_kv_dtype")
        pool = await self.registry.obtain(spec, may_replace=tenant == ANY_TENANT)
        session_id = SessionId(secrets.token_hex(16))
        core = self.table.open(session_id, executor, ttl, client_name, self.now())
        pool.manager.tick(self.now())
        pool.manager.open_session(session_id, executor)
        live = LiveSession(core, pool, secrets.token_hex(16), tenant, read_only_memory)
        pool.sessions.add(session_id)
        self._live[session_id] = live
        self._tokens[live.attach_token] = live
        self.no_session.clear()
        self.num_opened += 1
        self._watch_deadlines()
        if self._ticker is None:
            self._ticker = self._clock.call_at(self.now() + _TICK, self._tick_pools)
        log.info("session_opened", client_name=client_name, executor=executor.value, ttl=ttl)
        return live

    def require(self, session_id: str, epoch: int, *, published: bool = True) -> LiveSession:
        """The session of a message, renewed by it, with its pool's clock set. Raises UnknownSession, StaleEpoch.

        By default all blocks that steps have committed are published, so that the call sees them in the index.
        """
        now = self._clock.time()
        core = self.table.require(SessionId(session_id), epoch, now)
        self.table.renew(core, now)
        live = self._live[core.id]
        live.pool.manager.tick(now)
        if published:
            live.pool.manager.publish_pending()
        return live

    def find(self, session_id: str) -> LiveSession | None:
        """The session of this id, not renewed."""
        return self._live.get(SessionId(session_id))

    def tenant_of(self, session_id: str) -> str | None:
        """Of a session, live or ended; None of one that is not known."""
        known = self._live.get(SessionId(session_id)) or self._ended.get(SessionId(session_id))
        return None if known is None else known.tenant

    def refuse_as_unknown(self, epoch: int) -> None:
        """Raises what a message with this epoch gets whose session is not known."""
        self.table.require(SessionId(""), epoch, self._clock.time())

    def forget_foretold(self, session_id: SessionId) -> None:
        """Its next step is read the usual way."""
        self._live[session_id].foretold = None

    def close(self, session_id: str, epoch: int, *, drained: bool) -> CloseResult:
        """Ends a session; drained also ends the quarantine of a session that has ended. Idempotent with drained.

        Raises UnknownSession, StaleEpoch.
        """
        self._end_expired()  # so that the session is either live or ended
        ended = self._ended.get(SessionId(session_id))
        if ended is None or not drained:
            return self._end_session(self.require(session_id, epoch), "closed", drained=drained)
        if epoch != ended.epoch:
            raise StaleEpoch("the session has another epoch", current_epoch=self.table.epoch)
        ended.drained = True
        self._end_quarantine_when_safe(ended)
        return CloseResult(0, 0)

    def take_stream(self, live: LiveSession, stream: StepCarrier, replaced: CacheError) -> None:
        """The session steps on this stream from now on; its stream so far ends with the error `replaced`."""
        if live.stream is not None:
            live.stream.end_with(replaced)
        live.stream = stream

    def lose_stream(self, live: LiveSession, stream: StepCarrier, *, with_grace: bool) -> None:
        """The stream has ended. with_grace, because its client went away: the session has a short grace to come back."""
        if live.lane is stream:
            live.lane = None
        if live.stream is stream:
            live.stream = None
            if with_grace:
                self.table.start_grace(live.core, self._clock.time())
                self._watch_deadlines()

    def redeem(self, token: str, parts: frozenset[Part], rank: int) -> tuple[LiveSession, Grant]:
        """The session of a token, and what the attach socket hands to the process of this rank that shows it, once.

        The grant has the rank's memory where it is among the parts; a step lane is for the caller to add. Every process that
        attaches keeps the session alive: it ends with the first that dies, and its quarantine with the last that unmaps.
        Raises AttachRefused.
        """
        live = self._tokens.get(token)
        if live is None:
            raise AttachRefused("UNKNOWN_TOKEN")
        if rank >= live.pool.info.spec.num_ranks:
            raise AttachRefused("UNKNOWN_RANK")
        if rank in live.attached:
            raise AttachRefused("UNKNOWN_TOKEN")
        if rank and Part.STEP_LANE in parts:  # the first rank steps for all
            raise AttachRefused("UNKNOWN_PART")
        has_memory = Part.MEMORY in parts
        if has_memory and live.tenant != ANY_TENANT:  # blocks of all tenants lie in it
            raise AttachRefused("TENANT_NOT_ALLOWED")
        if has_memory and live.core.ttl > MAX_TTL:
            raise AttachRefused("LEASE_TOO_LONG")
        live.attached.add(rank)
        if len(live.attached) == live.pool.info.spec.num_ranks:
            del self._tokens[token]
        if has_memory:
            live.mapped.add(rank)
            live.pool.mappings.add(live.core.id)
        log.info("process_attached", client_name=live.core.client_name, parts=" ".join(sorted(parts)), rank=rank)
        return live, Grant(
            fields=live.pool.arena_fields(rank, read_only=live.read_only_memory) if has_memory else {},
            descriptors=live.pool.arena_descriptors(rank, read_only=live.read_only_memory) if has_memory else [],
            on_process_end=lambda: self._process_ended(live, rank),
            on_unmapped=lambda: self._unmapped(live, rank),
            session_over=live.over,
        )

    def start_draining(self) -> None:
        """Refuses new sessions and watches from now on. Open watches end; sessions go on."""
        self.is_draining = True
        for live in self.sessions:
            for watch in list(live.watches):
                watch.end_with(Draining("the service is stopping"))

    def stop(self) -> None:
        """Ends the streams and cancels the timers; sessions end with the process."""
        self._stop_timer()
        for timer in (*self._quieting, *((self._ticker,) if self._ticker is not None else ())):
            timer.cancel()
        for live in self.sessions:
            _end_streams(live, Draining("the service is stopping"))

    def _end_session(self, live: LiveSession, cause: str, *, drained: bool = False) -> CloseResult:
        session_id = live.core.id
        # Copies that run in a thread write as an attached process would: their destinations must not be reused yet.
        copying = live.pool.copying
        may_still_write = copying is not None or (live.may_write(self.now()) and not drained)
        self.table.end_session(live.core)
        live.pool.manager.tick(self.now())
        result = live.pool.manager.close_session(session_id, may_still_write=may_still_write)
        live.pool.reclaim_soon()
        del self._live[session_id]
        self._tokens.pop(live.attach_token, None)
        live.pool.sessions.discard(session_id)
        ended = self._ended[session_id] = _Ended(live.core.epoch, live.tenant, live if may_still_write else None, drained)
        if may_still_write:
            live.pool.quarantines.add(session_id)
            if copying is not None or not live.mapped:
                self._end_quarantine_when_safe(ended)  # when the copies are done, or the device is quiet
        self._forget_oldest_ended()
        _end_streams(live, UnknownSession("the session has ended"))
        for watch in list(live.watches):
            watch.end_with(UnknownSession("the session has ended"))
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

    def _process_ended(self, live: LiveSession, rank: int) -> None:
        if not live.over.is_set():
            self._end_session(live, f"process of rank {rank} ended" if rank else "process ended")

    def _unmapped(self, live: LiveSession, rank: int) -> None:
        live.mapped.discard(rank)
        if live.pool.is_on_device:
            live.quiet_at = self.now() + self._quiet
        if live.mapped:
            return
        live.pool.mappings.discard(live.core.id)
        ended = self._ended.get(live.core.id)
        if ended is not None:
            self._end_quarantine_when_safe(ended)

    def _end_quarantine_when_safe(self, ended: _Ended) -> None:
        """Ends the quarantine of an ended session once neither its processes, nor a device, nor a copy can write any more."""
        live = ended.live
        if live is None:
            return
        if live.may_write(self.now()) and not ended.drained:
            if not live.mapped:
                self._look_when_quiet(ended, live.quiet_at)
            return
        if live.pool.copying is not None:  # perhaps a later copy, which began when the first was done
            live.pool.copying.add_done_callback(lambda _: self._end_quarantine_when_safe(ended))
            return
        ended.live = None
        num_blocks = live.pool.manager.end_quarantine(live.core.id)
        live.pool.quarantines.discard(live.core.id)
        log.info("quarantine_ended", client_name=live.core.client_name, num_blocks=num_blocks)

    def _look_when_quiet(self, ended: _Ended, quiet_at: float) -> None:
        def look() -> None:
            self._quieting.discard(timer)
            self._end_quarantine_when_safe(ended)

        timer = self._clock.call_at(quiet_at, look)
        self._quieting.add(timer)

    def _forget_oldest_ended(self) -> None:
        for session_id in list(self._ended)[: max(0, len(self._ended) - _MAX_REMEMBERED)]:
            if self._ended[session_id].live is None:
                del self._ended[session_id]

    def _watch_deadlines(self) -> None:
        """Sets the timer to the next deadline. Renewals only move deadlines away, so they do not set it."""
        deadline = self.table.next_deadline()
        if deadline is None or deadline >= self._timer_deadline:
            return
        self._stop_timer()
        self._timer_deadline = deadline
        self._timer = self._clock.call_at(deadline, self._end_expired)

    def _end_expired(self) -> None:
        self._stop_timer()
        for core in self.table.expired(self._clock.time()):
            self._end_session(self._live[core.id], "expired")
        self._watch_deadlines()

    def _tick_pools(self) -> None:
        """Runs what fell due in the pools: pins, times to live, limits. Once a second while there is a pool."""
        now, self._ticker = self.now(), None
        is_left = False
        for pool in self.registry.pools:
            pool.manager.tick(now)
            is_left |= pool.manager.do_due_work()
        if self.registry.pools:
            self._ticker = self._clock.call_at(now + (_TICK_AGAIN if is_left else _TICK), self._tick_pools)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_deadline = None, float("inf")


def _end_streams(live: LiveSession, error: CacheError) -> None:
    """Ends the carriers of the session's steps."""
    for stream in {live.stream, live.lane} - {None}:
        assert stream is not None
        stream.end_with(error)
    live.stream = live.lane = None
