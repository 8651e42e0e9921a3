"""What a stream needs of the request that it is written for, be it computed in this process or in the engine of a front.

Protocols alone, so that a process without a model serves streams, too.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ...outputs.plain_reader import PlainReader
from ...values.errors import EngineError
from ...values.output_chunk import OutputChunk, PlainTokens

Send = Callable[[OutputChunk | EngineError], None]


class Streamed(Protocol):
    """One request under way."""

    @property
    def request_id(self) -> str:
        """The id under which it is known."""

    def cancel(self) -> None:
        """Nothing more of it is wanted. Idempotent; one that has ended is left alone."""

    def fail(self, refusal: EngineError) -> None:
        """End it with an error. One that has ended is left alone."""

    def take_more(self) -> PlainTokens | None:
        """The plain tokens since the last call. Behind all that was sent, and all that this call sends."""

    def let_take_more(self, on_more: Callable[[], None]) -> None:
        """A reader asks by take_more for what is new. on_more: tells it that there is something."""

    def let_read(self, reader: PlainReader, number: int) -> bool:
        """A reader of many requests asks for what is new, and knows this one by the number. False: let_take_more is the way."""


Admit = Callable[[pb.GenerateRequest, Send], Awaitable[Streamed]]
