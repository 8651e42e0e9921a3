"""Pipe: frames over a socket between the first rank and another one, each of which notices at once when the other has ended."""

import socket

from .failures import PipeEnded
from .messages import HEAD, MOST_BYTES


class Pipe:
    """One end. Not for several threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, kind: int, body: bytes = b"", timeout_s: float | None = None) -> None:
        """Raises PipeEnded."""
        assert len(body) <= MOST_BYTES, "a step's arrays are far smaller"
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(HEAD.pack(kind, len(body)) + body)
        except TimeoutError:
            raise PipeEnded("it does not read") from None
        except OSError as error:
            raise PipeEnded(f"its pipe is closed: {error.strerror}") from None

    def receive(self, timeout_s: float | None = None) -> tuple[int, bytearray]:
        """Kind and body. Raises PipeEnded."""
        try:
            self._connection.settimeout(timeout_s)
            kind, length = HEAD.unpack(self._read(HEAD.size))
            return int(kind), self._read(length)
        except TimeoutError:
            raise PipeEnded("it does not answer") from None
        except OSError as error:
            raise PipeEnded(f"its pipe is closed: {error.strerror}") from None

    def close(self) -> None:
        self._connection.close()

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view, done = memoryview(data), 0
        while done < num_bytes:
            count = self._connection.recv_into(view[done:])
            if not count:
                raise PipeEnded("its pipe is closed")
            done += count
        return data
