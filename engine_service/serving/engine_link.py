"""EngineLink: a front's end of its lane. It asks the engine on behalf of clients, and hands on what comes for each call.

The engine has calls take turns, and their messages wait there meanwhile. So that they are not many, no further message is read
from clients while those that the engine has not answered yet are large together. Counted are those that hold no place of the
front any more (turns.py). A large message holds its place until its answer comes, and a GenerateMany call has a bound of its
own: counted here as well, a few of them would keep the messages of all others out.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import grpc.aio

from kvkeeper.common.service.methods import peer
from kvkeeper.common.service.turns import has_left_place
from kvkeeper.common.trust.caller import calling

from ..rpc.methods import too_many_waiting
from ..values.errors import EngineError
from ..values.output_chunk import TokenColumns
from .frames import FrontSetUp, FrontState, Kind, Message
from .lane import Lane

_TRACE_KEYS = ("traceparent", "tracestate")
_trace: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("trace", default=())


class TraceNote(grpc.aio.ServerInterceptor):
    """Notes the trace that a call is part of, which goes on in the engine."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        metadata: Sequence[tuple[str, str]] = details.invocation_metadata or ()
        _trace.set(tuple((key, value) for key, value in metadata if key in _TRACE_KEYS))
        return await continuation(details)


class EngineCall:
    """One call, as the engine knows it."""

    def __init__(self, link: "EngineLink", number: int) -> None:
        self._link, self.number = link, number
        self.num_bytes = 0  # of its message, until the engine answers; 0 where another bound holds it
        self.replies = asyncio.Queue[tuple[Kind, Any]]()
        self.take: Callable[[Kind, Any], None] = lambda kind, body: self.replies.put_nowait((kind, body))
        self.take_tokens: Callable[[list[int]], None] = lambda token_ids: None  # the tokens of a request

    def send(self, path: str, raw: bytes) -> None:
        """Send the call's message, in the name of the running call's caller."""
        self._link.send_message(self, Message(path, calling(), peer.get(), raw, _trace.get()))

    def send_kind(self, kind: Kind, body: Any = None) -> None:
        self._link.lane.send(kind, self.number, body)

    def drop(self) -> None:
        """Nothing more of it is wanted, or to come. Idempotent."""
        self._link.drop(self)


class EngineLink:
    """The lane, and the calls that were asked for on it."""

    def __init__(self, on_state: Callable[[FrontState], None], on_stop: Callable[[float], None]) -> None:
        """on_state: called with each state of the engine; on_stop: called with the seconds in which to end."""
        self.lane = Lane(self.take, self._note_loss)  # to be joined to the engine's
        self.set_up: asyncio.Future[FrontSetUp] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self.max_unanswered = 0  # bytes of messages that hold no place
        self._on_state, self._on_stop = on_state, on_stop
        self._calls: dict[int, EngineCall] = {}
        self._last_number = 0
        self._num_unanswered = 0  # bytes
        self._has_room = asyncio.Event()

    # -- for calls

    def ask(self) -> EngineCall:
        """A new call, with its message to be sent. To be dropped."""
        self._last_number += 1
        asked = self._calls[self._last_number] = EngineCall(self, self._last_number)
        return asked

    def send_message(self, asked: EngineCall, message: Message) -> None:
        if has_left_place():
            asked.num_bytes = len(message.raw)
            self._num_unanswered += len(message.raw)
        self.lane.send(Kind.MESSAGE, asked.number, message)

    async def wait_room(self) -> None:
        """Wait until another message may be read: those that the engine has not answered are few."""
        while self._num_unanswered > self.max_unanswered:
            self._has_room.clear()
            await self._has_room.wait()

    async def call(self, path: str, raw: bytes) -> bytes:
        """The answer to a message. Raises EngineError."""
        async with contextlib.aclosing(self.stream(path, raw)) as replies:
            async for answer in replies:
                return answer
        raise AssertionError("a call of one answer has one")

    async def stream(self, path: str, raw: bytes) -> AsyncGenerator[bytes, None]:
        """The answers to a message. Raises EngineError."""
        asked = self.ask()
        try:
            asked.send(path, raw)
            while True:
                kind, body = await asked.replies.get()
                if kind is Kind.END:
                    return
                if kind is not Kind.ANSWER:
                    raise parse_refusal(kind, body)
                yield body
                asked.send_kind(Kind.TAKEN)
        finally:
            asked.drop()

    async def ping(self) -> None:
        """Wait until the engine's loop has replied."""
        asked = self.ask()
        try:
            asked.send_kind(Kind.PING)
            await asked.replies.get()
        finally:
            self._calls.pop(asked.number, None)

    def drop(self, asked: EngineCall) -> None:
        if self._calls.pop(asked.number, None) is not None:
            self.lane.send(Kind.DROPPED, asked.number)
            self._note_answer(asked)

    def _note_answer(self, asked: EngineCall) -> None:
        if asked.num_bytes:
            self._num_unanswered -= asked.num_bytes
            asked.num_bytes = 0
            self._has_room.set()

    # -- for the lane

    def take(self, kind: Kind, number: int, body: Any) -> None:
        if kind is Kind.TOKENS:
            columns: TokenColumns = body
            calls, first, token_ids = self._calls, 0, columns.token_ids.tolist()
            for each, end in zip(columns.numbers.tolist(), columns.counts.cumsum().tolist(), strict=True):
                if each in calls:
                    calls[each].take_tokens(token_ids[first:end])
                first = end
        elif number:
            if (asked := self._calls.get(number)) is not None:
                self._note_answer(asked)
                asked.take(kind, body)
        elif kind is Kind.PING:
            self.lane.send(Kind.PONG)
        elif kind is Kind.SET_UP:
            self.set_up.set_result(body)
        elif kind is Kind.STATE:
            self._on_state(body)
        elif kind is Kind.STOP:
            self._on_stop(body)

    def _note_loss(self) -> None:
        self.lost.set()


def parse_refusal(kind: Kind, body: Any) -> EngineError:
    """What FULL and ERROR stand for."""
    refusal: EngineError = too_many_waiting(body) if kind is Kind.FULL else body
    return refusal
