"""Lane: the socket between an engine and a front, from either end.

Frames that are sent in one turn of the event loop leave in one write. The socket is one of a pair that the engine made, and
no other process has an end of it; when either process ends, the other one is told at once.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from .frames import FrameReader, Kind, frame

_MOST_UNSENT = 1 << 20  # bytes, beyond which what can wait is to wait

Take = Callable[[Kind, int, bytes], None]


class Lane(asyncio.Protocol):
    """One end. Made by open_lane."""

    def __init__(self, take: Take, lost: Callable[[], None]) -> None:
        """take: called with each frame that comes. lost: called once when the other end is gone, or this one is closed."""
        self._take, self._lost = take, lost
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self.is_full = False  # much is unsent
        self.on_room: Callable[[], None] = lambda: None  # called when is_full ends

    def send(self, kind: Kind, number: int = 0, body: bytes = b"") -> None:
        """Never waits. Nothing happens where the other end is gone."""
        if self._transport is None:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame(kind, number, body))

    def close(self) -> None:
        """Send what is unsent, and end. Idempotent."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None:
            self._transport.write(b"".join(unsent))

    # -- for asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_MOST_UNSENT)

    def data_received(self, data: bytes) -> None:
        for kind, number, body in self._reader.add(data):
            self._take(kind, number, body)

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.on_room()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost()


async def open_lane(end: socket.socket, take: Take, lost: Callable[[], None]) -> Lane:
    """The lane on one end of a pair of sockets, which it then owns."""
    end.setblocking(False)
    _, lane = await asyncio.get_running_loop().create_connection(lambda: Lane(take, lost), sock=end)
    return lane
