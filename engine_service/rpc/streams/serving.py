"""Streams: the calls of clients that get tokens as they come, Generate and GenerateMany, and how many of them are open.

Knows neither model nor loop: what admits a request is handed in, so that engine and fronts serve streams with the same code.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from kvkeeper.common.service.methods import peer
from kvkeeper.common.service.turns import TakesTurns
from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ...values.errors import EngineError
from ...values.output_chunk import OutputChunk
from ..ownership import shown_id
from .encode_chunk import response_of
from .many import ManyCalls, ManyRequests, Read, Write
from .stream_buffer import PacedBuffer
from .stream_pace import StreamPace
from .streamed import Admit


class TakesUnread(Protocol):
    """What reads the output of one request."""

    async def take_unread(self) -> tuple[list[OutputChunk], EngineError | None]:
        """What is new, once there is something, and the error that ends it."""


class Streams:
    """The open streams of a process."""

    def __init__(
        self,
        admit: Admit,
        turns: TakesTurns,
        pace: StreamPace,
        max_many_calls: int,
        message_bytes: int,
        hide_bug: Callable[[], EngineError],
    ) -> None:
        """turns: in which the requests of a GenerateMany call begin. message_bytes, hide_bug: as of ManyRequests."""
        self._admit, self._turns, self._pace, self._hide_bug = admit, turns, pace, hide_bug
        self._message_bytes = message_bytes
        self._many_calls = ManyCalls(max_many_calls)
        self.num_open = 0  # streams that have not been answered to their end
        self._has_none = asyncio.Event()
        self._has_none.set()

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The answer to Generate. The request ends with it."""
        unread = PacedBuffer(self._pace)
        generation = await self._admit(request, unread.buffer.put)
        unread.buffer.read(generation)
        with self.counted():
            try:
                async for response in responses(request.request_id or shown_id(generation.request_id), unread):
                    yield response
            finally:
                generation.cancel()

    async def generate_many(self, read: Read, write: Write) -> None:
        """A GenerateMany call to its end."""
        with self._many_calls.opened(peer.get()):
            many = ManyRequests(self._admit, self._turns, self._pace, self._message_bytes, self.counted, self._hide_bug)
            await many.serve(read, write)

    async def wait_none(self) -> None:
        """Until each stream has been answered to its end."""
        await self._has_none.wait()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a stream that has not been answered to its end."""
        self.num_open += 1
        self._has_none.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._has_none.set()


async def responses(request_id: str, unread: TakesUnread) -> AsyncIterator[pb.GenerateResponse]:
    """The messages of a request, to its last. Raises the error that ends it."""
    while True:
        chunks, error = await unread.take_unread()
        for chunk in chunks:
            yield response_of(request_id, chunk)
        if error is not None:
            raise error
        if chunks and chunks[-1].usage is not None:
            return
