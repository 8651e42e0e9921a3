"""Frames as bytes, for lanes between processes: a head of fixed size, then the body. Nothing is pickled.

Bodies are messages, columns, or JSON of the values in frames.py. Both ends are of one build, on one machine.
"""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final

from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.trust.caller import Caller, Role

from ..rpc.encode_chunk import response_of
from ..values.errors import EngineError
from ..values.output_chunk import OutputChunk, Usage
from ..values.request import FinishReason
from ..values.token_columns import TokenColumns
from .frames import Admitted, Frame, FrontSetUp, FrontState, Kind, Message, Stopped

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

    def __init__(self, reason: str, message: str, metadata: dict[str, str]) -> None:
        super().__init__(message, **metadata)
        self.reason = reason


def _to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _message_to_bytes(message: Message) -> bytes:
    caller = message.caller
    head = _to_json((message.path, caller.name, caller.tenant, caller.role, message.peer, message.trace))
    return b"".join((_HEAD_LENGTH.pack(len(head)), head, message.raw))


def _message_of(raw: bytes) -> Message:
    (length,) = _HEAD_LENGTH.unpack_from(raw)
    start = _HEAD_LENGTH.size
    path, name, tenant, role, peer, trace = json.loads(raw[start : start + length])
    caller = Caller(name, tenant, Role(role))
    return Message(path, caller, peer, raw[start + length :], tuple((key, value) for key, value in trace))


def _chunk_to_bytes(chunk: OutputChunk) -> bytes:
    return response_of("", chunk).SerializeToString()


def _chunk_of(raw: bytes) -> OutputChunk:
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
        lambda told: _to_json((told.request_id, told.makes_text, told.context)),
        lambda raw: Admitted(*json.loads(raw)),
    ),
    Kind.CHUNK: (_chunk_to_bytes, _chunk_of),
    Kind.TOKENS: (TokenColumns.to_bytes, TokenColumns.from_bytes),
    Kind.FAILED: (str.encode, bytes.decode),
    Kind.REFUSED: (_to_json, json.loads),
    Kind.MESSAGE: (_message_to_bytes, _message_of),
    Kind.STOPPED: (lambda stopped: _to_json((stopped.index, stopped.num_tokens)), lambda raw: Stopped(*json.loads(raw))),
    Kind.BROKEN: _ERROR,
}
