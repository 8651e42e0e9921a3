"""RunClock: the time in which this service could hear its clients.

Leases, graces and the patience with claims count time in which an engine could have been heard. While the loop stands still,
because one call takes long or the process is stopped, messages wait unread, and when it goes on, timers come before them. So
that no client's time runs out meanwhile, what passes between two looks at this clock counts for no more than MOST_S, and it is
looked at more often than that by itself. It never runs faster than the clock below it: what ends by it may end late, never
early. An engine that has to know whether its lease still holds goes by a clock of its own.
"""

from collections.abc import Callable

import structlog

from ..memory.timeouts import Clock, TimerHandle

log = structlog.get_logger()

MOST_S = 0.1
_BEAT_S = 0.05
_TOLD_S = 1.0  # a stall that is this long is told in the log


class RunClock:
    """See the module; a Clock. Looks at itself until close."""

    def __init__(self, clock: Clock) -> None:
        """clock: the event loop, which a stall holds up."""
        self._clock = clock
        self._now = self._seen_at = clock.time()
        self._timer = clock.call_at(self._seen_at + _BEAT_S, self._beat)

    def time(self) -> float:
        at = self._clock.time()
        passed = max(at - self._seen_at, 0.0)
        self._seen_at = at
        self._now += min(passed, MOST_S)
        if passed > _TOLD_S:
            log.warning("service_stalled", seconds=round(passed, 3))
        return self._now

    def call_at(self, when: float, callback: Callable[[], None], /) -> TimerHandle:
        """Where a stall comes between, the callback runs right after it, and so before `when`."""
        left = when - self.time()
        return self._clock.call_at(self._seen_at + left, callback)

    def close(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        self.time()
        self._timer = self._clock.call_at(self._seen_at + _BEAT_S, self._beat)
