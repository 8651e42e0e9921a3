"""Whether a disk that fails or hangs is asked at all.

Rules: some failures in a row make it rest, an overdue order does so at once; while an order is overdue nothing new is asked of
it; after the rest one order is tried, and the next rest is twice as long if that fails too. One success ends all that.
"""

_MOST_FAILURES = 3  # in a row
_FIRST_REST, _LONGEST_REST = 1.0, 60.0  # seconds


class Breaker:
    """Of one disk. Times are seconds of the pool's clock."""

    def __init__(self) -> None:
        self.num_rests = 0
        self._num_failures = 0  # in a row
        self._rest = _FIRST_REST
        self._until = float("-inf")

    def rests(self, now: float) -> bool:
        """Whether nothing is to be asked of it now."""
        return now < self._until

    def seconds_left(self, now: float) -> float:
        """Until the disk is asked again."""
        return max(self._until - now, 0.0)

    @property
    def is_on_trial(self) -> bool:
        """Whether it has rested and not succeeded since: one order at a time is enough."""
        return self._num_failures >= _MOST_FAILURES

    def succeeded(self) -> None:
        """An order was run, in time."""
        self._num_failures, self._rest = 0, _FIRST_REST

    def failed(self, now: float, *, is_hang: bool = False) -> None:
        """An order was refused, or is overdue."""
        self._num_failures = _MOST_FAILURES if is_hang else self._num_failures + 1
        if self._num_failures >= _MOST_FAILURES and not self.rests(now):
            self.num_rests += 1
            self._until = now + self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
