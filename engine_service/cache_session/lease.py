"""Lease: until when this engine's session is certain to live, by the engine's own clock.

When a session ends, its blocks go to other engines, which overwrite them; an engine that was stopped meanwhile learns of it
last, and the step that it had under way may have read anything. So no result is used before it is certain that the session
lived until the computing had ended: either the last message that renewed the session was sent so recently that it cannot have
ended since, or a message that is sent now is still accepted.

The time counts from when a message was sent, not from its answer: the cache service got it later than that, and so lets the
lease end later. It may even hold a session for longer than its lease, where it was stopped itself; that does no harm here.
"""

import time
from collections.abc import Callable

# A session ends before its lease if its stream breaks and its engine sends nothing for this long.
GRACE_S = 0.5
_RENEW_SHARE = 1 / 3  # of the lease, after which it is renewed


def boot_time() -> float:
    """Seconds that also pass while the process is stopped and while the machine sleeps.

    CLOCK_MONOTONIC stands still while the machine sleeps. Then it depends on the clock of the cache service whether the lease
    has ended, and nothing here should depend on that: a clock that never runs slower than another's errs to the safe side.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """Whether the session is certain to live. Not certain before the first renewal."""

    def __init__(self, ttl_s: float, clock: Callable[[], float] = boot_time) -> None:
        self._clock = clock
        self.renew_s = ttl_s * _RENEW_SHARE
        self._certain_s = min(ttl_s, GRACE_S)
        self._certain_until = float("-inf")

    def now(self) -> float:
        """The time to give to renewed; read it before the message is sent."""
        return self._clock()

    def renewed(self, sent_at: float) -> None:
        """The session has replied to a message that was sent at this time."""
        self._certain_until = sent_at + self._certain_s

    @property
    def is_certain(self) -> bool:
        """Whether the session cannot have ended before now."""
        return self._clock() < self._certain_until
