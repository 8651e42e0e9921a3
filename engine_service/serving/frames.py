"""Frames between an engine and a front: what each of them says to the other. lane.py makes bytes of them.

Numbers are a front's, one for each call, and are not used again. A call begins with MESSAGE; Generate is a call, too, with
answers of its own. An engine replies to a call with FULL; or with ANSWER, each confirmed by TAKEN, and END; or with ADMITTED,
then CHUNK and TOKENS; and with ERROR in place of all that is still to come. A front ends a call with DROPPED, whether it is
over or not; then nothing more is said of it. A front has found the caller at its gate; the engine takes its word, since no
other process has an end of their lane. Pure.
"""

from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from kvkeeper.common.trust.caller import Caller

_PATHS = ("tls_cert", "tls_key", "tls_client_ca", "auth_tokens")


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """Names are those of EngineConfig. Knows of no other engine and of no cache service."""

    listen: str  # with the port that was taken
    connections: int
    connection_calls: int
    receive_memory: int
    message_bytes: int  # of a message with a prompt
    receive_seconds: float
    many_calls: int
    stream_interval_ms: float
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    auth_tokens: Path | None
    reflection: bool
    has_gateway: bool

    def to_json(self) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "FrontConfig":
        """What to_json gave."""
        values: dict[str, Any] = {name: Path(value) if name in _PATHS and value else value for name, value in fields.items()}
        return cls(**values)


class Kind(IntEnum):
    """What a frame says; in brackets its body."""

    # From the engine, of the front; their number is 0.
    SET_UP = 0  # [FrontSetUp] the first frame
    STATE = 1  # [FrontState]
    STOP = 2  # [seconds: float] stop serving, and end
    # From the engine, of a call.
    FULL = 11  # [limit: int] too many calls wait for their turn
    ANSWER = 12  # [bytes of a message]
    END = 13
    ERROR = 14  # [EngineError]
    ADMITTED = 15  # [Admitted]
    CHUNK = 16  # [OutputChunk] its text is the front's to make where Admitted says so
    TOKENS = 17  # [TokenColumns] of many requests, tokens that have nothing with them; its number is 0
    # From a front, of the front.
    READY = 30
    FAILED = 31  # [str] it cannot serve, and ends
    REFUSED = 32  # [counts by reason: dict] calls that were not let in so far
    # From a front, of a call.
    MESSAGE = 41  # [Message]
    TAKEN = 42  # the last ANSWER was written
    STOPPED = 43  # [Stopped] a continuation met a stop string
    BROKEN = 44  # [EngineError] the request is to end with this error
    DROPPED = 45
    # From either end; the number is 0 where the engine asks.
    PING = 46
    PONG = 47  # with the number of the PING


Frame = tuple[Kind, int, Any]  # kind, number, body; None: it has none


@dataclass(frozen=True, slots=True)
class Message:
    """The message of one call, its caller, its connection, and the trace that it is part of."""

    path: str  # /package.Service/Method
    caller: Caller
    peer: str
    raw: bytes
    trace: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class FrontSetUp:
    """What a front needs before it serves."""

    config: dict[str, Any]  # of FrontConfig
    tokenizer: dict[str, Any] | None  # Tokenizer.state; None: the model has none, or the front has the engine's


@dataclass(frozen=True, slots=True)
class FrontState:
    """What changes while a front serves."""

    is_serving: bool  # requests are taken
    is_leaving: bool  # for good
    max_len: int  # most tokens of a sequence


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that is queued."""

    request_id: str  # as it is known
    makes_text: bool  # whether the front makes text of its tokens, and finds its stop strings
    context: list[int]  # the end of its prompt


@dataclass(frozen=True, slots=True)
class Stopped:
    """A continuation ended with so many tokens, the last one of which completed a stop string."""

    index: int
    num_tokens: int
