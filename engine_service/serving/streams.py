"""Streams: the calls of clients that get tokens as they come, Generate and GenerateMany.

GenerateMany has the requests of one process on one call, so that what is written does not grow with the number of streams. One
task reads the client's messages and has each request begin as if it were a call of its own. Another one, the call's own, writes
what is new of all requests as one message: the first token and the end of a request at once, all else by rounds. An error ends
its request alone. A client that does not read is dealt with request by request, as with Generate.

Knows neither model nor loop: what admits a request is handed in.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from kvkeeper.common.service.methods import peer
from kvkeeper.common.trust.caller import is_still_known
from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..messages import make_response, responses
from ..rpc.methods import REFUSALS
from ..rpc.ownership import shown_id
from ..rpc.stream_pace import HasUnread, StreamPace
from ..values.errors import EngineError, InvalidField, QueueFull, WrongCredential
from .stream_buffer import PacedBuffer, StreamBuffer

_MOST_UNITS = 1 << 14  # tokens and log probabilities in one message, about a megabyte; one request may bring more


class RequestStream(Protocol):
    """One request under way; its output is put into the buffer that it was admitted with."""

    @property
    def request_id(self) -> str:
        """The id under which it is known."""

    def cancel(self) -> None:
        """Nothing more of it is wanted. Idempotent."""


Admit = Callable[[pb.GenerateRequest, StreamBuffer], Awaitable[RequestStream]]
Read = AsyncIterator[pb.GenerateManyRequest]
Write = Callable[[pb.GenerateManyResponse], Awaitable[None]]


class _Numbered:
    """One request of the call, from its message to the last that is written of it."""

    def __init__(self, number: int, asked_id: str, notify: Callable[..., None]) -> None:
        """asked_id: that its client gave it, or empty. notify: called with the request and as the Notifier of its buffer."""
        self.number = number
        self.buffer = StreamBuffer(partial(notify, self))
        self.starting: asyncio.Task[None] | None = None
        self.generation: RequestStream | None = None
        self.asked_id, self.has_sent_id = asked_id, False

    def end(self) -> None:
        """Nothing more is written of it. One that goes on is cancelled."""
        if self.starting is not None:
            self.starting.cancel()
        if self.generation is not None:
            self.generation.cancel()


class ManyRequests:
    """The requests of one call. Serve once."""

    def __init__(
        self,
        admit: Admit,
        pace: StreamPace,
        message_bytes: int,
        hide_bug: Callable[[], EngineError],
    ) -> None:
        """message_bytes: of the largest message; the requests that are about to begin have as many together.

        hide_bug: logs the exception that is being handled, a bug; the refusal that its client gets.
        """
        self._admit, self._hide_bug = admit, hide_bug
        self._requests: dict[int, _Numbered] = {}
        self._urgent: dict[int, None] = {}  # numbers of those that do not wait for a round, in order
        self._unread: dict[int, None] = {}  # of those that do
        self._has_unread = HasUnread(pace)
        self._reads_parts = False  # whether its client does
        self._most_starting_bytes, self._starting_bytes = message_bytes, 0
        self._has_started = asyncio.Event()  # set when a request is no longer about to begin

    async def serve(self, read: Read, write: Write) -> None:
        """Returns when the client has ended its side and its requests have ended. Raises InvalidField, WrongCredential."""
        reading = asyncio.create_task(self._read(read))
        reading.add_done_callback(lambda _: self._has_unread.notify(at_once=True))
        try:
            while True:
                has_round = await self._has_unread.wait()
                for message in self._take(has_round=has_round):
                    await write(message)
                if reading.done():
                    reading.result()
                    if not self._requests:
                        return
        finally:
            reading.cancel()
            for request in self._requests.values():
                request.end()

    async def _read(self, read: Read) -> None:
        async for message in read:
            if message.begin and not is_still_known():
                raise WrongCredential("the credential of this call has changed or is no longer known")
            self._reads_parts |= message.reads_parts
            for one in message.begin:
                await self._begin(one.number, one.request)
            for number in message.cancel:
                if (request := self._requests.pop(number, None)) is not None:
                    request.end()

    async def _begin(self, number: int, message: pb.GenerateRequest) -> None:
        if number in self._requests:
            raise InvalidField("begin: another request of the call has this number", field="begin")
        size = message.ByteSize()
        while self._starting_bytes and self._starting_bytes + size > self._most_starting_bytes:
            self._has_started.clear()
            await self._has_started.wait()
        request = self._requests[number] = _Numbered(number, message.request_id, self._notify)
        self._starting_bytes += size
        request.starting = asyncio.create_task(self._start(request, message))
        request.starting.add_done_callback(lambda _: self._note_start(size))

    def _note_start(self, size: int) -> None:
        self._starting_bytes -= size
        self._has_started.set()

    async def _start(self, request: _Numbered, message: pb.GenerateRequest) -> None:
        try:
            request.generation = await self._admit(message, request.buffer)
        except EngineError as error:
            request.buffer.put(error)
        except Exception:
            request.buffer.put(self._hide_bug())
        finally:
            request.starting = None
            if request.buffer.has_unread:
                self._notify(request, at_once=True)

    def _notify(self, request: _Numbered, *, at_once: bool) -> None:
        if request.starting is not None:  # tokens of another process may come before its admission is heard of here
            return
        at_once = at_once or not request.has_sent_id
        (self._urgent if at_once else self._unread)[request.number] = None
        self._has_unread.notify(at_once=at_once)

    def _take(self, *, has_round: bool) -> Iterator[pb.GenerateManyResponse]:
        """What is new and does not wait for a round, in messages of a bounded size; has_round: of all requests."""
        unread, self._urgent = self._urgent, {}
        if has_round:
            unread, self._unread = unread | self._unread, {}
        ended: list[int] = []
        parts, message, num_units = _Parts(), pb.GenerateManyResponse(), 0
        for number in unread:
            if (request := self._requests.get(number)) is None:
                continue
            if self._reads_parts and request.has_sent_id and (tokens := request.buffer.take_tokens()) is not None:
                num_units += parts.add(number, *tokens)
            else:
                num_units += self._add_responses(message, number, request, ended)
            if num_units >= _MOST_UNITS:
                yield parts.added_to(message)
                parts, message, num_units = _Parts(), pb.GenerateManyResponse(), 0
        if num_units or message.responses:
            yield parts.added_to(message)
        for number in ended:
            if (request := self._requests.pop(number, None)) is not None:
                request.end()

    def _add_responses(self, message: pb.GenerateManyResponse, number: int, request: _Numbered, ended: list[int]) -> int:
        """Add what is new of one request, and its number to those that ended if it did. How much it is."""
        num_units = 0
        chunks, error = request.buffer.take()
        for chunk in chunks:
            request_id = ""
            if not request.has_sent_id:
                assert request.generation is not None
                request_id = request.asked_id or shown_id(request.generation.request_id)
                request.has_sent_id = True
            message.responses.add(number=number, response=make_response(request_id, chunk))
            num_units += len(chunk.token_ids) + sum(1 + len(one.top_token_ids) for one in chunk.logprobs)
        if error is not None:
            message.responses.add(number=number, error=REFUSALS.to_status(error).SerializeToString())
        if error is not None or (chunks and chunks[-1].usage is not None):
            ended.append(number)
        return num_units


class _Parts:
    """Plain parts of one message, by column."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._num_tokens: list[int] = []
        self._token_ids: list[int] = []
        self._texts: list[str] = []

    def add(self, number: int, token_ids: list[int], text: str) -> int:
        """One part. How much it is."""
        self._numbers.append(number)
        self._num_tokens.append(len(token_ids))
        self._token_ids += token_ids
        self._texts.append(text)
        return len(token_ids)

    def added_to(self, message: pb.GenerateManyResponse) -> pb.GenerateManyResponse:
        if self._numbers:
            texts = self._texts if any(self._texts) else ()
            parts = pb.PlainParts(numbers=self._numbers, num_tokens=self._num_tokens, token_ids=self._token_ids, texts=texts)
            message.parts.CopyFrom(parts)
        return message


class ManyCalls:
    """How many GenerateMany calls are open. Each may hold a message that is on its way in for as long as it is open."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_of: Counter[str] = Counter()  # by connection

    @contextmanager
    def opened(self, connection: str) -> Iterator[None]:
        """A call of a connection. Raises QueueFull; one connection has a quarter of the limit, a Unix socket all of it."""
        limit_each = self._limit if connection.startswith("unix:") else max(1, self._limit // 4)
        if self._num_of[connection] >= limit_each or self._num_of.total() >= self._limit:
            limit = limit_each if self._num_of[connection] >= limit_each else self._limit
            raise QueueFull(f"{limit} such calls are open, the most that may", limit=limit, flag="--many-calls")
        self._num_of[connection] += 1
        try:
            yield
        finally:
            self._num_of[connection] -= 1
            if not self._num_of[connection]:
                del self._num_of[connection]


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
