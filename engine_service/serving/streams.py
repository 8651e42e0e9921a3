"""Streams: the calls of clients that get tokens as they come, Generate and GenerateMany, and how many of them are open.

Knows neither model nor loop: what admits a request is handed in, so that engine and fronts serve streams with the same code.
"""

from collections.abc import AsyncGenerator, Callable

from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.service.methods import peer

from ..rpc.encode_chunk import responses
from ..rpc.ownership import shown_id
from ..rpc.stream_pace import StreamPace
from ..values.errors import EngineError
from .many import Admit, ManyCalls, ManyRequests, Read, Write
from .stream_buffer import PacedBuffer


class Streams:
    """The open streams of a process."""

    def __init__(
        self,
        admit: Admit,
        pace: StreamPace,
        max_many_calls: int,
        message_bytes: int,
        hide_bug: Callable[[], EngineError],
    ) -> None:
        """message_bytes, hide_bug: as of ManyRequests."""
        self._admit, self._pace, self._hide_bug = admit, pace, hide_bug
        self._message_bytes = message_bytes
        self._many_calls = ManyCalls(max_many_calls)

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The answer to Generate. The request ends with it."""
        unread = PacedBuffer(self._pace)
        generation = await self._admit(request, unread.buffer)
        try:
            async for response in responses(request.request_id or shown_id(generation.request_id), unread):
                yield response
        finally:
            generation.cancel()

    async def generate_many(self, read: Read, write: Write) -> None:
        """A GenerateMany call to its end."""
        with self._many_calls.opened(peer.get()):
            many = ManyRequests(self._admit, self._pace, self._message_bytes, self._hide_bug)
            await many.serve(read, write)
