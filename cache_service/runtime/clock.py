"""A clock that does not count stalls: the time in which this service could read its clients' messages.

While the loop stands still, because a call takes long or the process is stopped, messages wait unread; when the loop goes on,
timers run before messages are read. Leases, graces and the patience with claims must not run out meanwhile. So the time between
two readings of this clock counts for MOST_S at most, and the clock reads itself more often than that. It never runs faster than
the clock below it: a lease may end late, never early. An engine that has to know whether its lease still holds uses a clock of
its own.
"""

from collections.abc import Callable

import structlog

from ..memory.timeouts import Clock, TimerHandle

log = structlog.get_logger()

MOST_S = 0.1
_BEAT_S = 0.05
_LOGGED_S = 1.0  # a stall of this length is logged


class StallFreeClock:
    """A Clock above another clock, without the other's stalls. Reads itself until close."""

    def __init__(self, clock: Clock) -> None:
        """clock: the event loop, which a stall delays."""
        self._clock = clock
        self._now = self._seen_at = clock.time()
        self._timer = clock.call_at(self._seen_at + _BEAT_S, self._beat)

    def time(self) -> float:
        at = self._clock.time()
        passed = max(at - self._seen_at, 0.0)
        self._seen_at = at
        self._now += min(passed, MOST_S)
        if passed > _LOGGED_S:
            log.warning("service_stalled", seconds=round(passed, 3))
        return self._now

    def call_at(self, when: float, callback: Callable[[], None], /) -> TimerHandle:
        """After a stall the callback runs at once, and so before `when` of this clock."""
        left = when - self.time()
        return self._clock.call_at(self._seen_at + left, callback)

    def close(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        self.time()
        self._timer = self._clock.call_at(self._seen_at + _BEAT_S, self._beat)
