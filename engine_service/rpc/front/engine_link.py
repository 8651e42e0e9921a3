"""EngineLink: a front's end of its lane. It asks the engine on behalf of clients, and hands on what comes for each call.

A call of a client asks for its turn before its message is read, as it would in the engine itself. Requests that come by a call
of many have no such turn: they ask, and send their message with it.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc.aio

from kvkeeper.service.fair_queue import TooManyWaiting
from kvkeeper.service.methods import peer
from kvkeeper.trust.caller import calling

from ..fronts.frames import Kind, parts_of
from ..fronts.lane import Lane, open_lane
from ..fronts.told import FrontSetUp, FrontState, Told, error_of

Told_ = tuple[Kind, bytes]
TakePlain = Callable[[list[int]], None]

_TRACE_KEYS = ("traceparent", "tracestate")
_trace: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("trace", default=())


class TraceNote(grpc.aio.ServerInterceptor):
    """Notes the trace that a call is part of, which goes on in the engine."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        told: Sequence[tuple[str, str]] = details.invocation_metadata or ()
        _trace.set(tuple((key, value) for key, value in told if key in _TRACE_KEYS))
        return await continuation(details)


class Asked:
    """One call, as the engine knows it."""

    def __init__(self, link: "EngineLink", number: int) -> None:
        self._link, self.number = link, number
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answers = asyncio.Queue[Told_]()
        self.take: Callable[[Kind, bytes], None] = lambda kind, body: self.answers.put_nowait((kind, body))
        self.take_plain: TakePlain = lambda token_ids: None  # the tokens of a request

    def send(self, path: str, raw: bytes) -> None:
        """Send the call's message, in the name of the running call's caller."""
        told = Told(path, calling(), peer.get(), _trace.get())
        self._link.lane.send(Kind.MESSAGE, self.number, told.with_message(raw))

    def tell(self, kind: Kind, body: bytes = b"") -> None:
        self._link.lane.send(kind, self.number, body)

    def leave(self) -> None:
        """The engine has the places, and gives them back itself."""

    def drop(self) -> None:
        """Nothing more of it is wanted, or to come. Idempotent."""
        self._link.drop(self)


_asked: ContextVar[Asked | None] = ContextVar("asked", default=None)


class EngineLink:
    """The lane, and the calls that were asked for on it. Made by open_link."""

    def __init__(self, on_state: Callable[[FrontState], None], on_stop: Callable[[float], None]) -> None:
        self.lane: Lane
        self.set_up: asyncio.Future[FrontSetUp] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self._on_state, self._on_stop = on_state, on_stop
        self._calls: dict[int, Asked] = {}
        self._last_number = 0

    # -- for calls

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[Asked]:
        """A place for one message, whose call is the one that begin and the others go on with. Raises TooManyWaiting."""
        asked = self._ask(client)
        try:
            await asked.granted
            _asked.set(asked)
            yield asked
        finally:
            asked.drop()

    def begin(self) -> Asked:
        """A call with a message to send: the running one, or for requests of a call of many, one of their own."""
        asked = _asked.get()
        if asked is not None:
            return asked
        asked = self._ask(peer.get())
        asked.granted.add_done_callback(lambda granted: granted.cancelled() or granted.exception())
        return asked

    async def call(self, path: str, raw: bytes) -> bytes:
        """The answer to a message. Raises ToldError."""
        async for answer in self.stream(path, raw):
            return answer
        raise AssertionError("a call of one answer has one")

    async def stream(self, path: str, raw: bytes) -> AsyncIterator[bytes]:
        """The answers to a message. Raises ToldError."""
        asked = self.begin()
        asked.send(path, raw)
        while True:
            kind, body = await asked.answers.get()
            if kind is Kind.ANSWER:
                yield body
                asked.tell(Kind.TAKEN)
            elif kind is Kind.ERROR:
                raise error_of(body)
            elif kind is Kind.END:
                return

    async def ping(self) -> None:
        """Until the engine's loop has answered."""
        self._last_number += 1
        asked = self._calls[self._last_number] = Asked(self, self._last_number)
        try:
            self.lane.send(Kind.PING, asked.number)
            await asked.answers.get()
        finally:
            self._calls.pop(asked.number, None)

    def drop(self, asked: Asked) -> None:
        if self._calls.pop(asked.number, None) is not None:
            self.lane.send(Kind.DROPPED, asked.number)

    def _ask(self, client: str) -> Asked:
        self._last_number += 1
        asked = self._calls[self._last_number] = Asked(self, self._last_number)
        self.lane.send(Kind.ASK, asked.number, client.encode())
        return asked

    # -- for the lane

    def take(self, kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.PARTS:
            for each, token_ids in parts_of(body):
                if (asked := self._calls.get(each)) is not None:
                    asked.take_plain(token_ids)
        elif number:
            if (asked := self._calls.get(number)) is not None:
                self._take_of_call(asked, kind, body)
        elif kind is Kind.SET_UP:
            self.set_up.set_result(FrontSetUp.of(body))
        elif kind is Kind.STATE:
            self._on_state(FrontState.of(body))
        elif kind is Kind.STOP:
            self._on_stop(float(body))

    def _take_of_call(self, asked: Asked, kind: Kind, body: bytes) -> None:
        if kind is Kind.GRANTED:
            if not asked.granted.done():
                asked.granted.set_result(None)
        elif kind is Kind.FULL:
            if not asked.granted.done():
                asked.granted.set_exception(TooManyWaiting(int(body)))
            asked.take(kind, body)
        else:
            asked.take(kind, body)

    def note_loss(self) -> None:
        self.lost.set()


async def open_link(end: socket.socket, on_state: Callable[[FrontState], None], on_stop: Callable[[float], None]) -> EngineLink:
    """The link over one end of a pair of sockets.

    on_state: told each state of the engine; on_stop: told the seconds in which to end.
    """
    link = EngineLink(on_state, on_stop)
    link.lane = await open_lane(end, link.take, link.note_loss)
    return link
