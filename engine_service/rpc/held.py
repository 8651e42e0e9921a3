"""Held: how many bytes of requests this process holds, and when that is enough.

An open request is counted from its arrival to its end with what its message takes: the message itself, as it came and taken
apart, and its tokens. One that would be too much is refused, and may come again when others have ended. Pure.
"""

from ..values.errors import TooMuchHeld

TIMES_MESSAGE = 4  # the bytes that came, the same taken apart, and 4 bytes or more for a token of 1 to 4 bytes, twice
EACH = 4096  # of a request, whatever its message


class Held:
    """See the module."""

    def __init__(self, limit: int) -> None:
        """Bytes."""
        self._limit = limit
        self.num_bytes = 0

    def take(self, message_bytes: int) -> "Hold":
        """Count a message. Raises TooMuchHeld."""
        wanted = EACH + TIMES_MESSAGE * message_bytes
        if self.num_bytes + wanted > self._limit:
            text = f"requests under way hold {self.num_bytes} bytes, this one {wanted}, and at most {self._limit} may be held"
            raise TooMuchHeld(text, requested=wanted, limit=self._limit)
        return Hold(self, wanted)


class Hold:
    """One request's share, until it is released."""

    def __init__(self, held: Held, num_bytes: int) -> None:
        self._held, self._num_bytes = held, num_bytes
        held.num_bytes += num_bytes

    def release(self) -> None:
        """Idempotent."""
        self._held.num_bytes -= self._num_bytes
        self._num_bytes = 0
