"""When a lost cache service is tried again: after pauses that grow, so that a service that is away costs next to nothing."""


class Backoff:
    """Pauses between tries. Times are seconds of any monotone clock, handed in."""

    def __init__(self, first_s: float = 0.25, longest_s: float = 15.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._pause_s = first_s
        self._until = float("-inf")

    def may_try(self, now: float) -> bool:
        """Whether the pause is over."""
        return now >= self._until

    def failed(self, now: float) -> float:
        """A try failed; the pause until the next one."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, self._longest_s)
        self._until = now + pause_s
        return pause_s

    def succeeded(self) -> None:
        """The next pause is the first one again."""
        self._pause_s, self._until = self._first_s, float("-inf")
