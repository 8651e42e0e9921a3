"""Step lanes: sockets of the same host for the messages of Step and a few other calls, beside gRPC and at less cost.

Owns the service's ends, and the form of a frame: a kind byte, then the unchanged bytes of a request, a response or a Status.
Rules: a lane belongs to one session from the start, and is a stream of steps like a StreamSteps call: it takes over from
another one, and another one from it. Answers go in the order of the requests. A refusal does not end the lane. Nothing here
waits for a client: an answer that finds the socket's buffer full ends the lane as if its client had gone, and an answer that
no frame can hold is asked for anew over gRPC, where a repeat gets it. The bytes of requests and answers are those of gRPC: the
handlers make them.
"""

import asyncio
import contextlib
import errno
import mmap
import socket
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvkeeper.common.trust.caller import Caller, Role, note_caller

from ..core.values.errors import CacheError, InvalidField
from ..memory.attach_server import Grant, Part
from ..runtime.live_session import CarrierKind, LiveSession
from ..runtime.session_manager import SessionManager
from .lane_calls import LaneCalls
from .methods import CONTRACT
from .status import REFUSALS
from .step_handler import StepHandler

T = TypeVar("T")

STEP_REQUEST, STEP_RESPONSE, STATUS, TOO_LARGE = b"\1", b"\2", b"\3", b"\4"
CALL, CALL_RESPONSE = b"\5", b"\6"
_BUFFER_BYTES = 1 << 20  # asked for; the kernel gives what it allows, and larger messages go over gRPC


class StepLanes:
    """Hands a session's parts to the process that attaches, with a lane where it asks for one."""

    def __init__(self, session_manager: SessionManager, handler: StepHandler, calls: LaneCalls, max_message_bytes: int) -> None:
        self.session_manager = session_manager
        self.handler = handler
        self.calls = calls
        # One for all lanes: a frame is taken out before the next one is read. With a byte to see that a message is too large.
        self.frame = memoryview(mmap.mmap(-1, 1 + max_message_bytes + 1))

    def redeem(self, token: str, parts: frozenset[Part], rank: int) -> Grant:
        """See AttachDesk. Where no socket can be had, the grant says so and its process steps over gRPC."""
        live, grant = self.session_manager.redeem(token, parts, rank)
        if Part.STEP_LANE not in parts:
            return grant
        try:
            theirs = self._open_lane(live)
        except OSError:  # out of descriptors
            return replace(grant, fields={**grant.fields, "step_lane": False})
        return replace(
            grant,
            fields={**grant.fields, "step_lane": True},
            descriptors=[*grant.descriptors, theirs.fileno()],
            given_away=theirs,
        )

    def _open_lane(self, live: LiveSession) -> socket.socket:
        """The end of a new lane that is for its process. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.setblocking(False)  # theirs is for its process to set
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            live.lane = StepLane(self, live, ours)
        except OSError:
            ours.close()
            theirs.close()
            raise
        return theirs


class StepLane:
    """The service's end of one lane, from the attach until the session or its client ends it."""

    kind = CarrierKind.LANE

    def __init__(self, lanes: StepLanes, live: LiveSession, connection: socket.socket) -> None:
        self._session_manager, self._handler, self._frame = lanes.session_manager, lanes.handler, lanes.frame
        self._calls = lanes.calls
        self._live = live
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        # For the copies of a step, or while others have their turns; no frame is read meanwhile.
        self._waiting: asyncio.Future[Any] | None = None
        context = copy_context()  # of each request: it comes from the caller that opened the session
        context.run(note_caller, Caller("lane", live.tenant, Role.ENGINE))
        context.run(self._loop.add_reader, connection, self._read_frame)

    def end_with(self, error: CacheError) -> None:
        """Ends the lane; its client gets this error, where the socket takes it."""
        with contextlib.suppress(OSError):
            self._socket.send(STATUS + _status(error))
        self._end(is_lost=False)

    def _read_frame(self) -> None:
        """Takes one frame; the loop comes back for the next one."""
        try:
            num_bytes = self._socket.recv_into(self._frame, 0, socket.MSG_TRUNC)  # the length of all of it, though cut off
        except BlockingIOError:
            return
        except OSError:
            num_bytes = 0
        if num_bytes == 0:
            self._end(is_lost=True)
        elif num_bytes > len(self._frame):
            self._send(STATUS, _status(InvalidField("the message is too large", field="request", limit=len(self._frame) - 2)))
        elif self._frame[0] == STEP_REQUEST[0]:
            self._take(bytes(self._frame[1:num_bytes]), self._apply_step, self._answer_step)
        elif self._frame[0] == CALL[0]:
            self._take(bytes(self._frame[1:num_bytes]), self._apply_call, self._answer_call)
        else:
            self._send(STATUS, _status(InvalidField("a frame from a client begins with the byte 1 or 5", field="request")))

    def _take(self, raw: bytes, apply: Callable[[bytes], T | Awaitable[T]], answer: Callable[[T], None]) -> None:
        """Applies a request. Its answer is sent at once, or when its awaitable reply is there."""
        try:
            reply = apply(raw)
        except Exception as error:
            self._send(STATUS, _status(error))
            return
        if isinstance(reply, Awaitable):
            self._loop.remove_reader(self._socket)
            self._waiting = asyncio.ensure_future(reply)
            self._waiting.add_done_callback(partial(self._take_late, answer))
        else:
            answer(reply)

    def _take_late(self, answer: Callable[[T], None], waiting: asyncio.Future[T]) -> None:
        """The awaitable reply is there, or the lane has ended."""
        if self._socket.fileno() == -1:
            waiting.cancelled() or waiting.exception()  # it is of no interest
            return
        self._waiting = None
        try:
            reply = waiting.result()
        except Exception as error:
            self._send(STATUS, _status(error))
        else:
            answer(reply)
        if self._socket.fileno() != -1:
            self._loop.add_reader(self._socket, self._read_frame)

    def _apply_step(self, raw: bytes) -> bytes | Awaitable[bytes]:
        _, reply = self._handler.apply(raw, self._live)
        if self._live.stream is not self:
            self._session_manager.take_stream(self._live, self)
        return reply

    def _answer_step(self, body: bytes) -> None:
        self._send(STEP_RESPONSE, body)
        self._handler.after_answer(self._live)

    def _apply_call(self, raw: bytes) -> Message | Awaitable[Message]:
        return self._calls.apply(raw, self._live)

    def _answer_call(self, answer: Message) -> None:
        self._send(CALL_RESPONSE, answer.SerializeToString())

    def _send(self, kind: bytes, body: bytes) -> None:
        """Never waits. A client that does not read its answers, or is gone, has lost the lane."""
        try:
            self._socket.send(kind + body)
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                self._send(TOO_LARGE, b"")
            else:
                self._end(is_lost=True)

    def _end(self, *, is_lost: bool) -> None:
        """is_lost: the client has gone away, or seems to, and its session has a grace to come back over gRPC."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if self._waiting is not None:
            self._waiting.cancel()
        self._session_manager.lose_stream(self._live, self, with_grace=is_lost)


def _status(error: Exception) -> bytes:
    """The google.rpc.Status of a refusal, as the trailers of a gRPC call carry it. Called where the error is handled."""
    refusal = error if isinstance(error, CacheError) else CONTRACT.hide_bug("StepLane")
    return REFUSALS.to_status(refusal).SerializeToString()
