"""How long a call may take and when it is repeated: one pure schedule for sync and async, unary and stream.

Only UNAVAILABLE is repeated, with the same bytes, after growing pauses or the pause that the service asks for. Times
are seconds of any monotone clock, handed in.
"""

import math
from dataclasses import dataclass, replace

from kvkeeper.client.errors import KvkeeperError

SLICED_TIMEOUT_S = 300.0  # of calls that let others pass: millions of blocks take a minute


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How long a call may take. timeout_s bounds the whole call, repeats included; math.inf: no bound.

    retry_s: how long after its start a call is still repeated.
    """

    timeout_s: float = 10.0
    retry_s: float = 3.0
    first_pause_s: float = 0.02
    longest_pause_s: float = 0.5

    def for_at_least(self, seconds: float) -> "CallOptions":
        """The same for a call that may take so long."""
        return self if seconds <= self.timeout_s else replace(self, timeout_s=seconds)


class Patience:
    """One call's deadline and its pauses."""

    def __init__(self, options: CallOptions, now: float) -> None:
        self._deadline = now + options.timeout_s
        self._retry_until = min(self._deadline, now + options.retry_s)
        self._pause = options.first_pause_s
        self._longest_pause = options.longest_pause_s

    def left(self, now: float) -> float | None:
        """Seconds until the deadline, at least a millisecond; None without a deadline."""
        return None if math.isinf(self._deadline) else max(self._deadline - now, 0.001)

    def pause_after(self, error: KvkeeperError, now: float) -> float | None:
        """Seconds to wait before the same call is repeated; None when it is not repeated."""
        pause = self._pause if error.retry_after is None else error.retry_after
        has_moved = error.reason == "REQUEST_MOVED"  # another engine is to be asked
        if not error.unavailable or has_moved or now + pause > self._retry_until:
            return None
        self._pause = min(2 * self._pause, self._longest_pause)
        return pause
