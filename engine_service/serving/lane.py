"""Lane: what joins an engine and a front, from either end; over a socket, or in memory where both are in one process.

Frames that are sent in one turn of the event loop leave together. The socket is one of a pair that the engine made, and no
other process has an end of it; when either process ends, the other one is told at once. Both carry the same frames, in order.
"""

import asyncio
import socket
from collections.abc import Callable
from contextvars import Context
from typing import Any, Protocol, cast

from .codec import FrameReader, frame
from .frames import Frame, Kind

_MOST_UNSENT = 1 << 20  # bytes, beyond which what can wait is to wait

Take = Callable[[Kind, int, Any], None]


class _Carrier(Protocol):
    """Brings frames to the other end."""

    def carry(self, frames: list[Frame]) -> None: ...

    def close(self) -> None:
        """What was carried arrives. Both ends lose the lane."""


class Lane:
    """One end. Open once it has a carrier, see join_by_socket and join_in_memory."""

    def __init__(self, take: Take, lost: Callable[[], None]) -> None:
        """take: called with each frame that comes. lost: called once when the other end is gone, or this one is closed."""
        self._take, self._lost = take, lost
        self._carrier: _Carrier | None = None
        self._unsent: list[Frame] = []
        self.is_full = False  # much is unsent
        self.on_room: Callable[[], None] = lambda: None  # called when is_full ends

    def send(self, kind: Kind, number: int = 0, body: Any = None) -> None:
        """Never waits. Nothing happens where the other end is gone."""
        if self._carrier is None:
            return
        if not self._unsent:
            # Of the task that sends, the other end is to know nothing but what the frames say.
            asyncio.get_running_loop().call_soon(self._flush, context=Context())
        self._unsent.append((kind, number, body))

    def close(self) -> None:
        """Send what is unsent, and end. Idempotent."""
        self._flush()
        if self._carrier is not None:
            self._carrier.close()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._carrier is not None:
            self._carrier.carry(unsent)

    # -- for the carrier

    def open(self, carrier: _Carrier) -> None:
        self._carrier = carrier

    def take(self, kind: Kind, number: int, body: Any) -> None:
        self._take(kind, number, body)

    def note_loss(self) -> None:
        if self._carrier is not None:
            self._carrier = None
            self._lost()


class _Socket(asyncio.Protocol):
    """Carries frames as bytes."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._reader = lane, FrameReader()
        self._transport: asyncio.Transport

    def carry(self, frames: list[Frame]) -> None:
        self._transport.write(b"".join(frame(*each) for each in frames))

    def close(self) -> None:
        self._transport.close()

    # -- for asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_MOST_UNSENT)
        self._lane.open(self)

    def data_received(self, data: bytes) -> None:
        for each in self._reader.add(data):
            self._lane.take(*each)

    def pause_writing(self) -> None:
        self._lane.is_full = True

    def resume_writing(self) -> None:
        self._lane.is_full = False
        self._lane.on_room()

    def connection_lost(self, error: Exception | None) -> None:
        self._lane.note_loss()


class _Memory:
    """Carries frames to another lane of this process."""

    def __init__(self, own: Lane, other: Lane) -> None:
        self._own, self._other = own, other

    def carry(self, frames: list[Frame]) -> None:
        for each in frames:
            self._other.take(*each)

    def close(self) -> None:
        for lane in (self._own, self._other):
            asyncio.get_running_loop().call_soon(lane.note_loss)


async def join_by_socket(lane: Lane, end: socket.socket) -> None:
    """Open a lane over one end of a pair of sockets, which it then owns."""
    end.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: _Socket(lane), sock=end)


def join_in_memory(one: Lane, other: Lane) -> None:
    """Make two lanes the ends of one."""
    one.open(_Memory(one, other))
    other.open(_Memory(other, one))
