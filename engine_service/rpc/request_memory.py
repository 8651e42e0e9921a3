"""RequestMemory: how many bytes of requests this process holds, and when another request is too much.

An open request counts from its arrival to its end with what its message takes: the message itself, as it came and taken
apart, and its tokens. A request that would exceed the limit is refused, and may come again when others have ended. Pure.
"""

from ..values.errors import TooMuchHeld

TIMES_MESSAGE = 4  # the bytes that came, the same taken apart, and 4 bytes or more for a token of 1 to 4 bytes, twice
EACH_BYTES = 4096  # counted for a request beside its message


class RequestMemory:
    """The bytes that open requests hold, and their limit."""

    def __init__(self, limit: int) -> None:
        """Bytes."""
        self._limit = limit
        self.num_bytes = 0

    def hold(self, message_bytes: int) -> "HeldBytes":
        """Count a message. Raises TooMuchHeld."""
        wanted = EACH_BYTES + TIMES_MESSAGE * message_bytes
        if self.num_bytes + wanted > self._limit:
            text = f"open requests hold {self.num_bytes} bytes and this one needs {wanted}; the limit is {self._limit}"
            raise TooMuchHeld(text, requested=wanted, limit=self._limit)
        return HeldBytes(self, wanted)


class HeldBytes:
    """What one request counts for, until it is released."""

    def __init__(self, memory: RequestMemory, num_bytes: int) -> None:
        self._memory, self._num_bytes = memory, num_bytes
        memory.num_bytes += num_bytes

    def release(self) -> None:
        """Idempotent."""
        self._memory.num_bytes -= self._num_bytes
        self._num_bytes = 0
