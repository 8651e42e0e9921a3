"""Lane: what joins an engine and a front, from either end; over a socket, or in memory where both are in one process.

Frames that are sent in one turn of the event loop leave together. The socket is one of a pair that the engine made, and no
other process has an end of it; when either process ends, the other one is notified at once. Both carry the same frames, in
order. Over a socket a frame is a head of fixed size, then its body: a message, columns, or JSON of the values in frames.py.
Nothing is pickled. Both ends are of one build, on one machine.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Final, Protocol, cast

from kvkeeper.common.trust.caller import Caller, Role
from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..messages import make_response
from ..values.errors import EngineError
from ..values.output_chunk import OutputChunk, TokenColumns, Usage
from ..values.request import FinishReason
from .frames import Admitted, Frame, FrontSetUp, FrontState, Kind, Message, Stopped

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


HEAD: Final = struct.Struct("<BQI")  # kind, number, bytes of the body
_HEAD_LENGTH: Final = struct.Struct("<I")
_REASONS = {pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}
_USAGE = tuple(Usage.__dataclass_fields__)


def frame(kind: Kind, number: int, body: Any) -> bytes:
    """One frame."""
    raw = b"" if body is None else _CODECS[kind][0](body)
    return HEAD.pack(kind, number, len(raw)) + raw


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> Iterator[Frame]:
        """Each frame that is complete. Raises ValueError for a kind that is none."""
        buffer, start = self._buffer, 0
        buffer += data
        while len(buffer) - start >= HEAD.size:
            number_of_kind, number, length = HEAD.unpack_from(buffer, start)
            end = start + HEAD.size + length
            if len(buffer) < end:
                break
            raw = bytes(memoryview(buffer)[start + HEAD.size : end])
            start, kind = end, Kind(number_of_kind)
            yield kind, number, _CODECS[kind][1](raw) if kind in _CODECS else None
        del buffer[:start]


class ForwardedError(EngineError):
    """An error of the other end."""

    reason = EngineError.reason  # until it is known which

    def __init__(self, reason: str, message: str, metadata: dict[str, str]) -> None:
        super().__init__(message, **metadata)
        self.reason = reason


def _to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _message_to_bytes(message: Message) -> bytes:
    head = _head_to_bytes(message.path, message.caller, message.peer, message.trace)
    return b"".join((_HEAD_LENGTH.pack(len(head)), head, message.raw))


def _parse_message(raw: bytes) -> Message:
    (length,) = _HEAD_LENGTH.unpack_from(raw)
    start = _HEAD_LENGTH.size
    path, caller, peer, trace = _parse_head(raw[start : start + length])
    return Message(path, caller, peer, raw[start + length :], trace)


_Trace = tuple[tuple[str, str], ...]


@lru_cache  # the calls of a connection have the same, but for traces
def _head_to_bytes(path: str, caller: Caller, peer: str, trace: _Trace) -> bytes:
    return _to_json((path, caller.name, caller.tenant, caller.role, peer, trace))


@lru_cache
def _parse_head(raw: bytes) -> tuple[str, Caller, str, _Trace]:
    path, name, tenant, role, peer, trace = json.loads(raw)
    return path, Caller(name, tenant, Role(role)), peer, tuple((key, value) for key, value in trace)


def _chunk_to_bytes(chunk: OutputChunk) -> bytes:
    return make_response("", chunk).SerializeToString()


def _parse_chunk(raw: bytes) -> OutputChunk:
    """Log probabilities stay messages, which have the same fields."""
    message = pb.GenerateResponse.FromString(raw)
    return OutputChunk(
        message.index,
        message.text,
        tuple(message.token_ids),
        _REASONS.get(message.finish_reason),
        Usage(*(getattr(message.usage, name) for name in _USAGE)) if message.HasField("usage") else None,
        tuple(message.logprobs),  # type: ignore[arg-type]
        tuple(message.prompt_logprobs),  # type: ignore[arg-type]
        message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
    )


_BYTES: tuple[Callable[[Any], bytes], Callable[[bytes], Any]] = bytes, bytes
_NUMBER = _to_json, json.loads
_ERROR = lambda error: _to_json((error.reason, str(error), error.metadata)), lambda raw: ForwardedError(*json.loads(raw))

_CODECS: dict[Kind, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    Kind.SET_UP: (lambda set_up: _to_json(asdict(set_up)), lambda raw: FrontSetUp(**json.loads(raw))),
    Kind.STATE: (lambda state: _to_json(asdict(state)), lambda raw: FrontState(**json.loads(raw))),
    Kind.STOP: _NUMBER,
    Kind.FULL: _NUMBER,
    Kind.ANSWER: _BYTES,
    Kind.ERROR: _ERROR,
    # Not by asdict, which would copy the context token by token, for each request.
    Kind.ADMITTED: (
        lambda admitted: _to_json((admitted.request_id, admitted.makes_text, admitted.context)),
        lambda raw: Admitted(*json.loads(raw)),
    ),
    Kind.CHUNK: (_chunk_to_bytes, _parse_chunk),
    Kind.TOKENS: (TokenColumns.to_bytes, TokenColumns.from_bytes),
    Kind.FAILED: (str.encode, bytes.decode),
    Kind.REFUSED: (_to_json, json.loads),
    Kind.MESSAGE: (_message_to_bytes, _parse_message),
    Kind.STOPPED: (lambda stopped: _to_json((stopped.index, stopped.num_tokens)), lambda raw: Stopped(*json.loads(raw))),
    Kind.BROKEN: _ERROR,
}
