"""Lease: until when this engine's hold on the pool is certain, by its own clock.

When a session ends, its blocks go to others, who overwrite them; an engine that was stopped meanwhile is the last to hear of
it. What it had under way then was computed from anything. So nothing that was computed is used before it is certain that the
session lived until the computing had ended: either the last message that renewed it was sent so recently that it cannot have
ended since, or a message that is sent now is still taken.

The time counts from when a message was sent, not from its answer: the cache service got it later than that, and so lets the
lease end later. It may even hold a session for longer than its lease, where it was stopped itself; that does no harm here.
"""

import time
from collections.abc import Callable

# A session that lasts ends before its lease where its stream breaks and nothing is heard of its engine for this long.
GRACE_S = 0.5
_RENEW_SHARE = 1 / 3  # of the lease, after which it is renewed


def boot_time() -> float:
    """Seconds that also pass while the process is stopped and while the machine sleeps.

    CLOCK_MONOTONIC stands still while the machine sleeps. Then it depends on the clock of the cache service whether the lease
    has ended, and nothing here should depend on that: a clock that never runs slower than another's errs to the safe side.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """See the module. Not certain before the first renewal."""

    def __init__(self, ttl_s: float, clock: Callable[[], float] = boot_time) -> None:
        self._clock = clock
        self.renew_s = ttl_s * _RENEW_SHARE
        self._certain_s = min(ttl_s, GRACE_S)
        self._certain_until = float("-inf")

    def now(self) -> float:
        """For renewed, read before the message is sent."""
        return self._clock()

    def renewed(self, sent_at: float) -> None:
        """The session's answer to a message that was sent then has come."""
        self._certain_until = sent_at + self._certain_s

    @property
    def is_certain(self) -> bool:
        """The session has not ended until now."""
        return self._clock() < self._certain_until
