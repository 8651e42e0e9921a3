"""The client's end of a step lane: a socket that the attach socket handed over, for steps and a few calls on the same host.

A frame is a kind byte and the unchanged bytes of a request, a response or a Status. Answers come in the order of the requests.
Knows no repeats: a lane that broke stays broken, and its session goes on over gRPC. StepLane sends without waiting, and its
answers are read by the loop; BlockingStepLane waits in its caller's thread, within a time. Every end of a request but a
refusal and MessageTooLarge ends the lane: an answer that came late would be taken for that of another request.
"""

import asyncio
import contextlib
import errno
import socket
from collections import deque

import grpc

from kvkeeper.client.attaching import attaching
from kvkeeper.client.errors import KvkeeperError, parse_error

STEP_REQUEST, CALL = b"\1", b"\5"
_STEP_RESPONSE, _STATUS, _TOO_LARGE, _CALL_RESPONSE = 2, 3, 4, 6
_NO_ROOM = (errno.EMSGSIZE, errno.EAGAIN)


class LaneBroken(Exception):
    """The lane has ended, with or without its request applied. A repeat over gRPC finds out."""


class MessageTooLarge(Exception):
    """The request, or the answer to one that was applied, fits no frame, or the lane is full. This request goes over gRPC."""


class StepLane:
    """Takes the socket over, and reads it in the running loop."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._frame = _make_frame(connection)
        self._loop = asyncio.get_running_loop()
        self._waiters = deque[asyncio.Future[bytes]]()  # for the answers, in the order of the requests
        self._farewell: KvkeeperError | None = None  # that the service ended the lane with, while nothing was asked
        self._loop.add_reader(connection, self._read_frame)

    @property
    def is_open(self) -> bool:
        """Whether neither side has ended it."""
        return self._socket.fileno() != -1

    async def exchange(self, request: bytes, kind: bytes = STEP_REQUEST) -> bytes:
        """The answer to a request. Raises KvkeeperError where the service refused it, LaneBroken, MessageTooLarge."""
        if not self.is_open or self._farewell is not None:
            raise self._end()
        try:
            self._socket.send(kind + request)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise MessageTooLarge from None
            while self._read_frame():
                pass  # what the service sent before it ended the lane
            raise self._end() from None
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """End the lane; requests that wait end with LaneBroken. Idempotent."""
        if self.is_open:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            while self._waiters:
                self._finish(LaneBroken())

    def _read_frame(self) -> bool:
        """Takes one frame. Whether there may be another one."""
        try:
            num_bytes = self._socket.recv_into(self._frame, 0, socket.MSG_TRUNC)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # reported before the frames that were sent before it
            return True
        except OSError:
            num_bytes = 0
        try:
            self._finish(_parse_answer(self._frame, num_bytes))
        except LaneBroken:
            self.close()
        except (KvkeeperError, MessageTooLarge) as error:
            self._finish(error)
        return self.is_open

    def _end(self) -> Exception:
        """Closes the lane; the error that the service ended it with, once, or LaneBroken."""
        self.close()
        farewell, self._farewell = self._farewell, None
        return farewell or LaneBroken()

    def _finish(self, outcome: bytes | Exception) -> None:
        """Ends the first request that waits. A status that no request waits for is the service's farewell."""
        if not self._waiters:
            if isinstance(outcome, KvkeeperError):
                self._farewell = outcome
            return
        waiter = self._waiters.popleft()
        if waiter.done():
            return
        if isinstance(outcome, bytes):
            waiter.set_result(outcome)
        else:
            waiter.set_exception(outcome)


class BlockingStepLane:
    """Takes the socket over. Not for use from two threads at once."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        """timeout_s: for the answer to a request."""
        connection.settimeout(timeout_s)
        self._socket = connection
        self._frame = _make_frame(connection)

    @property
    def is_open(self) -> bool:
        """Whether this side has not ended it."""
        return self._socket.fileno() != -1

    async def exchange(self, request: bytes, kind: bytes = STEP_REQUEST) -> bytes:
        """As that of StepLane. Raises KvkeeperError also where the answer is late."""
        if not self.is_open:
            raise LaneBroken
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the service's last frame may say why
                self._socket.send(kind + request)
            return _parse_answer(self._frame, self._read_frame())
        except (KvkeeperError, MessageTooLarge):
            raise
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise MessageTooLarge from None
            self.close()
            if isinstance(error, TimeoutError):
                raise KvkeeperError(grpc.StatusCode.DEADLINE_EXCEEDED, message="no answer in time") from None
            raise LaneBroken from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the lane. Idempotent."""
        self._socket.close()

    def _read_frame(self) -> int:
        while True:
            with contextlib.suppress(ConnectionResetError):  # reported before the frames that were sent before it
                return self._socket.recv_into(self._frame, 0, socket.MSG_TRUNC)


def _make_frame(connection: socket.socket) -> bytearray:
    """Room for any frame: both ends have a buffer of the same size, and no frame is larger than that."""
    return bytearray(connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))


def _parse_answer(frame: bytearray, num_bytes: int) -> bytes:
    """The response in the first bytes of frame; num_bytes may be more than it holds.

    Raises KvkeeperError for a Status, MessageTooLarge, and LaneBroken for the end and for what no service sends.
    """
    if not 0 < num_bytes <= len(frame):
        raise LaneBroken
    kind, body = frame[0], bytes(memoryview(frame)[1:num_bytes])
    if kind in (_STEP_RESPONSE, _CALL_RESPONSE):
        return body
    if kind == _STATUS:
        raise parse_error(body)
    raise MessageTooLarge if kind == _TOO_LARGE else LaneBroken


def attach_lane(path: str, token: str, timeout_s: float) -> socket.socket | None:
    """A socket for steps without a mapping of the memory; None where the service had none to give. Raises KvkeeperError."""
    with attaching(path, token, timeout_s, "step-lane") as handed_over:
        lane = handed_over.take_lane()
    handed_over.connection.close()
    return lane
