"""EndedSessions: the sessions that have ended, and the quarantine of blocks that each leaves behind.

Rules: blocks that a session may still write stay in quarantine until its mappings and the pool's running copies are gone, and
on a device a while longer, or until its client says that it has drained. A session is remembered at least as long as its
quarantine lasts, and a while longer, so that a repeated CloseSession gets its reply.
"""

from collections import OrderedDict
from dataclasses import dataclass

import structlog

from ..core.values.errors import StaleEpoch
from ..core.values.types import SessionId
from .clock import Clock, TimerHandle
from .live_session import LiveSession

log = structlog.get_logger()

_MAX_REMEMBERED = 4096


@dataclass(slots=True)
class _Ended:
    """A session that ended; live is set only while it has a quarantine."""

    epoch: int
    tenant: str
    live: LiveSession | None
    drained: bool


class EndedSessions:
    """The ended sessions of one service."""

    def __init__(self, clock: Clock, quiet: float) -> None:
        """quiet: seconds that a device may continue with the work of a process that is gone."""
        self._clock = clock
        self._quiet = quiet
        self._quieting: set[TimerHandle] = set()
        self._ended: OrderedDict[SessionId, _Ended] = OrderedDict()

    def __contains__(self, session_id: str) -> bool:
        return SessionId(session_id) in self._ended

    def find_tenant(self, session_id: str) -> str | None:
        """None of one that is not known."""
        known = self._ended.get(SessionId(session_id))
        return None if known is None else known.tenant

    def may_still_write(self, live: LiveSession, *, drained: bool) -> bool:
        """Whether a session that ends now needs a quarantine.

        Copies that run in a thread write as an attached process would: their destinations must not be reused yet.
        """
        return live.pool.copying is not None or (live.may_write(self._clock.time()) and not drained)

    def add(self, live: LiveSession, *, drained: bool, in_quarantine: bool) -> None:
        ended = self._ended[live.core.id] = _Ended(live.core.epoch, live.tenant, live if in_quarantine else None, drained)
        if in_quarantine:
            live.pool.quarantines.add(live.core.id)
            if live.pool.copying is not None or not live.mapped:
                self._end_when_safe(ended)  # when the copies are done, or the device is quiet
        self._forget_oldest()

    def drain(self, session_id: str, epoch: int) -> None:
        """Its client says that nothing of it is running any more. Raises StaleEpoch."""
        ended = self._ended[SessionId(session_id)]
        if epoch != ended.epoch:
            raise StaleEpoch("the session has another epoch", current_epoch=ended.epoch)
        ended.drained = True
        self._end_when_safe(ended)

    def unmapped(self, live: LiveSession, rank: int) -> None:
        """The process of this rank maps the arena no more, of a session that has ended or is still live."""
        live.mapped.discard(rank)
        if live.pool.is_on_device:
            live.quiet_at = self._clock.time() + self._quiet
        if live.mapped:
            return
        live.pool.mappings.discard(live.core.id)
        ended = self._ended.get(live.core.id)
        if ended is not None:
            self._end_when_safe(ended)

    def stop(self) -> None:
        """Cancels the timers."""
        for timer in self._quieting:
            timer.cancel()

    def _end_when_safe(self, ended: _Ended) -> None:
        """Ends the quarantine of an ended session once neither its processes, nor a device, nor a copy can write any more."""
        live = ended.live
        if live is None:
            return
        if live.may_write(self._clock.time()) and not ended.drained:
            if not live.mapped:
                self._look_when_quiet(ended, live.quiet_at)
            return
        if live.pool.copying is not None:  # perhaps a later copy, which began when the first was done
            live.pool.copying.add_done_callback(lambda _: self._end_when_safe(ended))
            return
        num_blocks = live.pool.manager.sessions.end_quarantine(live.core.id)
        ended.live = None
        live.pool.quarantines.discard(live.core.id)
        log.info("quarantine_ended", client_name=live.core.client_name, num_blocks=num_blocks)

    def _look_when_quiet(self, ended: _Ended, quiet_at: float) -> None:
        def look() -> None:
            self._quieting.discard(timer)
            self._end_when_safe(ended)

        timer = self._clock.call_at(quiet_at, look)
        self._quieting.add(timer)

    def _forget_oldest(self) -> None:
        for session_id in list(self._ended)[: max(0, len(self._ended) - _MAX_REMEMBERED)]:
            if self._ended[session_id].live is None:
                del self._ended[session_id]
