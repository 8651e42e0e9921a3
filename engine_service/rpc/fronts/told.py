"""What an engine and a front tell each other beside messages: who calls, errors, and what a front needs to serve.

A front has found the caller at its gate; the engine takes its word, since no one else has an end of their lane.
"""

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

from kvkeeper.common.trust.caller import Caller, Role

from ...values.errors import EngineError

_HEAD_LENGTH = struct.Struct("<I")
_STOPPED = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Told:
    """Of one call: its path, who calls, its connection, and the trace that it is part of."""

    path: str  # /package.Service/Method
    caller: Caller
    peer: str
    trace: tuple[tuple[str, str], ...] = ()

    def with_message(self, raw: bytes) -> bytes:
        """Both as the body of a frame."""
        head = json.dumps((self.path, self.caller.name, self.caller.tenant, self.caller.role, self.peer, self.trace)).encode()
        return b"".join((_HEAD_LENGTH.pack(len(head)), head, raw))

    @classmethod
    def split(cls, body: bytes) -> "tuple[Told, bytes]":
        """What with_message was made of."""
        (length,) = _HEAD_LENGTH.unpack_from(body)
        start = _HEAD_LENGTH.size
        path, name, tenant, role, peer, trace = json.loads(body[start : start + length])
        told = cls(path, Caller(name, tenant, Role(role)), peer, tuple((key, value) for key, value in trace))
        return told, body[start + length :]


@dataclass(frozen=True, slots=True)
class FrontSetUp:
    """What a front needs before it serves."""

    config: dict[str, Any]  # of FrontConfig
    tokenizer: dict[str, Any] | None  # Tokenizer.state; None: the model has none

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, body: bytes) -> "FrontSetUp":
        return cls(**json.loads(body))


@dataclass(frozen=True, slots=True)
class FrontState:
    """What changes while a front serves."""

    is_serving: bool  # requests are taken
    is_leaving: bool  # for good
    max_len: int  # most tokens of a sequence

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, body: bytes) -> "FrontState":
        return cls(**json.loads(body))


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that is queued."""

    request_id: str  # as it is known
    makes_text: bool  # whether the front makes text of its tokens, and finds its stop strings
    context: list[int]  # the end of its prompt

    def to_bytes(self) -> bytes:
        """Each request has this done, and asdict would copy the context token by token."""
        return json.dumps((self.request_id, self.makes_text, self.context)).encode()

    @classmethod
    def of(cls, body: bytes) -> "Admitted":
        return cls(*json.loads(body))


class ToldError(EngineError):
    """A refusal of the engine, as its front tells it."""

    def __init__(self, reason: str, message: str, metadata: dict[str, str]) -> None:
        super().__init__(message, **metadata)
        self.reason = reason


def error_to_bytes(error: EngineError) -> bytes:
    return json.dumps((error.reason, str(error), error.metadata)).encode()


def error_of(body: bytes) -> ToldError:
    """What error_to_bytes was given."""
    return ToldError(*json.loads(body))


def stopped_to_bytes(index: int, num_tokens: int) -> bytes:
    """A continuation ended with so many tokens, the last one of which completed a stop string."""
    return _STOPPED.pack(index, num_tokens)


def stopped_of(body: bytes) -> tuple[int, int]:
    """What stopped_to_bytes was given."""
    index, num_tokens = _STOPPED.unpack(body)
    return index, num_tokens
