"""Sessions on their pools: what opens and renews them, and what ends them.

All calls on the core start here or hold a session from here. They run on one event loop, so the core needs no locks; only
opening a session awaits anything. Rules: only messages renew a session. When a session ends, by CloseSession or by itself
(lease, grace, death of its process), its sequences are reclaimed at once; the blocks that it may still write go into
quarantine (ended_sessions.py). Leases and graces are timed by the clock that is handed in, which does not count time in which
this service could not read messages.
"""

import asyncio
import secrets

import structlog

from kvkeeper.common.trust.caller import ANY_TENANT

from ..core.calls.sessions import CloseResult
from ..core.values.errors import Draining, InvalidField, NotImplementedYet, StreamReplaced, UnknownSession
from ..core.values.kv_spec import KvSpec
from ..core.values.types import Executor, SessionId
from ..memory.attach_server import AttachRefused, Grant, Part
from .clock import Clock, TimerHandle
from .ended_sessions import EndedSessions
from .lease import SessionTable
from .live_session import LiveSession, StepCarrier
from .pool_registry import PoolRegistry

log = structlog.get_logger()

MIN_TTL = 0.5  # seconds
DEFAULT_TTL = 10.0
MAX_TTL = 60.0
MAX_UNATTACHED_TTL = 3600.0
_TICK = 1.0  # seconds between two ticks of the pools
_TICK_AGAIN = 0.01  # seconds, after a tick that left work


class SessionManager:
    """The live sessions of one service."""

    def __init__(self, registry: PoolRegistry, clock: Clock, epoch: int, max_sessions: int, quiet: float = 0.0) -> None:
        """quiet: seconds that a device may continue with the work of a process that is gone."""
        self.registry = registry
        self.table = SessionTable(epoch, max_sessions)
        self.epoch = epoch
        self.is_draining = False
        self.num_opened = 0
        self.num_reaped = 0
        self.no_session = asyncio.Event()  # set while no session is live
        self.no_session.set()
        self.clock = clock
        self._live: dict[SessionId, LiveSession] = {}
        self._tokens: dict[str, LiveSession] = {}
        self._ended = EndedSessions(clock, quiet)
        self._timer: TimerHandle | None = None
        self._timer_deadline = float("inf")
        self._ticker: TimerHandle | None = None  # while there is a pool

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
        caller: str = "",
        read_only_memory: bool = False,
        packs_host_blocks: bool = False,
        takes_partial: bool = False,
    ) -> LiveSession:
        """tenant: that its caller acts for. caller: that the session and its sequences count for, see SessionTable.check_room.

        read_only_memory: where a process attaches, it may only read.
        packs_host_blocks: its client converts blocks for a host tier of few bits, where it runs the orders.
        takes_partial: its hits may end within a block.
        Raises Draining, PoolNotReady, OutOfPools, OutOfSessions, InvalidField, NotImplementedYet.
        """
        if self.is_draining:
            raise Draining("the service is stopping")
        self.table.check_room(caller)  # before a pool is made, or an idle one replaced, for a session that is then refused
        if read_only_memory and self.registry.is_on_device:
            raise InvalidField("read_only_memory: memory on a device can be written, too", field="read_only_memory")
        if executor is Executor.ENGINE and not packs_host_blocks and self.registry.sizes.stored(spec).host_kv_dtype:
            text = "the host tier keeps K and V in few bits, which this client does not convert: see --host-kv-dtype"
            raise NotImplementedYet(text, feature="host_kv_dtype")
        pool = await self.registry.obtain(spec, may_replace=tenant == ANY_TENANT)
        session_id, attach_token = SessionId(secrets.token_hex(16)), secrets.token_hex(16)
        pool.manager.state.tick(self.clock.time())  # what falls due may fail, and then there is no session
        core = self.table.open(session_id, executor, ttl, client_name, self.clock.time(), caller)
        pool.manager.sessions.open(session_id, executor, caller, takes_partial=takes_partial)
        live = LiveSession(core, pool, attach_token, tenant, read_only_memory)
        pool.sessions.add(session_id)
        self._live[session_id] = live
        self._tokens[live.attach_token] = live
        self.no_session.clear()
        self.num_opened += 1
        self._watch_deadlines()
        if self._ticker is None:
            self._ticker = self.clock.call_at(self.clock.time() + _TICK, self._tick_pools)
        log.info("session_opened", client_name=client_name, executor=executor.name.lower(), ttl=ttl)
        return live

    def require(self, session_id: str, epoch: int, *, published: bool = True) -> LiveSession:
        """The session of a message, renewed by it, with its pool's clock set. Raises UnknownSession, StaleEpoch.

        By default all blocks that steps have committed are published, so that the call sees them in the index.
        """
        now = self.clock.time()
        core = self.table.require(SessionId(session_id), epoch, now)
        self.table.renew(core, now)
        live = self._live[core.id]
        live.pool.manager.state.tick(now)
        if published:
            live.pool.manager.maintenance.publish_pending()
        return live

    def find(self, session_id: str) -> LiveSession | None:
        """The session of this id, not renewed."""
        return self._live.get(SessionId(session_id))

    def find_tenant(self, session_id: str) -> str | None:
        """The tenant of a session, live or ended; None for one that is not known."""
        live = self.find(session_id)
        return self._ended.find_tenant(session_id) if live is None else live.tenant

    def refuse_as_unknown(self, epoch: int) -> None:
        """Raises what a message with this epoch gets whose session is not known."""
        self.table.require(SessionId(""), epoch, self.clock.time())

    def close(self, session_id: str, epoch: int, *, drained: bool) -> CloseResult:
        """Ends a session; drained also ends the quarantine of a session that has ended. Idempotent with drained.

        Raises UnknownSession, StaleEpoch.
        """
        self._end_expired()  # so that the session is either live or ended
        if not drained or session_id not in self._ended:
            return self._end_session(self.require(session_id, epoch), "closed", drained=drained)
        self._ended.drain(session_id, epoch)
        return CloseResult(0, 0)

    def take_stream(self, live: LiveSession, stream: StepCarrier) -> None:
        """The session steps on this stream from now on; its stream so far ends with StreamReplaced."""
        if live.stream is not None:
            live.stream.end_with(StreamReplaced("another stream of this session took over"))
        live.stream = stream

    def lose_stream(self, live: LiveSession, stream: StepCarrier, *, with_grace: bool) -> None:
        """The stream has ended. with_grace, because its client went away: the session has a short grace to come back."""
        if live.lane is stream:
            live.lane = None
        if live.stream is stream:
            live.stream = None
            if with_grace:
                self.table.start_grace(live.core, self.clock.time())
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
        grant = Grant(  # a device may fail here, and then the token is not spent
            fields=live.pool.arena_fields(rank, read_only=live.read_only_memory) if has_memory else {},
            descriptors=live.pool.arena_descriptors(rank, read_only=live.read_only_memory) if has_memory else [],
            on_process_end=lambda: self._process_ended(live, rank),
            on_unmapped=lambda: self._ended.unmapped(live, rank),
            session_over=live.over,
        )
        live.attached.add(rank)
        if len(live.attached) == live.pool.info.spec.num_ranks:
            del self._tokens[token]
        if has_memory:
            live.mapped.add(rank)
            live.pool.mappings.add(live.core.id)
        log.info("process_attached", client_name=live.core.client_name, parts=" ".join(sorted(parts)), rank=rank)
        return live, grant

    def start_draining(self) -> None:
        """Refuses new sessions and watches from now on. Open watches end; sessions go on."""
        self.is_draining = True
        for live in self.sessions:
            live.end_watches(Draining("the service is stopping"))

    def stop(self) -> None:
        """Ends the streams and cancels the timers; sessions end with the process."""
        self._stop_timer()
        self._ended.stop()
        if self._ticker is not None:
            self._ticker.cancel()
        for live in self.sessions:
            live.end_carriers(Draining("the service is stopping"))

    def _end_session(self, live: LiveSession, cause: str, *, drained: bool = False) -> CloseResult:
        session_id = live.core.id
        may_still_write = self._ended.may_still_write(live, drained=drained)
        self.table.end_session(live.core)
        live.pool.manager.state.tick(self.clock.time())
        result = live.pool.manager.sessions.close(session_id, may_still_write=may_still_write)
        live.pool.reclaim_soon()
        del self._live[session_id]
        self._tokens.pop(live.attach_token, None)
        live.pool.sessions.discard(session_id)
        self._ended.add(live, drained=drained, in_quarantine=may_still_write)
        live.over.set()
        if not self._live:
            self.no_session.set()
        if cause != "closed":
            self.num_reaped += 1
        live.end_carriers(UnknownSession("the session has ended"))
        live.end_watches(UnknownSession("the session has ended"))
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

    def _watch_deadlines(self) -> None:
        """Sets the timer to the next deadline. Renewals only move deadlines away, so they do not set it."""
        deadline = self.table.next_deadline()
        if deadline is None or deadline >= self._timer_deadline:
            return
        self._stop_timer()
        self._timer_deadline = deadline
        self._timer = self.clock.call_at(deadline, self._end_expired)

    def _end_expired(self) -> None:
        self._stop_timer()
        for core in self.table.expired(self.clock.time()):
            self._end_session(self._live[core.id], "expired")
        self._watch_deadlines()

    def _tick_pools(self) -> None:
        """Runs what fell due in the pools: pins, times to live, limits. Once a second while there is a pool."""
        now, self._ticker = self.clock.time(), None
        is_left = False
        for pool in self.registry.pools:
            pool.manager.state.tick(now)
            is_left |= pool.manager.maintenance.do_due_work()
        if self.registry.pools:
            self._ticker = self.clock.call_at(now + (_TICK_AGAIN if is_left else _TICK), self._tick_pools)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_deadline = None, float("inf")
