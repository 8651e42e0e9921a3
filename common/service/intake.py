"""Intake: has each call of a server wait for its turn before its message comes, so that many large ones do not fill its memory.

gRPC holds a few kilobytes of a message until a method asks for it, and only then lets the whole message come. A call has a
place (turns.py) while its message comes. A large message keeps it until its call ends or has counted it elsewhere; a message
that does not come in time ends its call, so that a slow sender keeps no place. Health checks have places of their own, which no
other message takes.
"""

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health

from kvkeeper.common.service.fair_queue import TooManyWaiting
from kvkeeper.common.service.status import Refusals
from kvkeeper.common.service.turns import TurnLimits, Turns, TurnSource

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # what read returns when the client has ended its side
SMALL_BYTES = 64 << 10  # of a message that leaves its place at once
_HEALTH_PREFIX = f"/{health.SERVICE_NAME}/"
_NUM_HEALTH_CHECKS = 16


class Intake(grpc.aio.ServerInterceptor):
    """The turns of a server's calls."""

    def __init__(
        self,
        limits: TurnLimits,
        seconds: float,
        refusals: Refusals,
        full: Callable[[int], Exception],
        late: Callable[[float], Exception],
    ) -> None:
        """seconds: from a call's turn until its message is there.

        full, late: the refusal of a call beyond so many that wait, and of a message that did not come in so many seconds.
        """
        self._seconds, self._refusals, self._full, self._late = seconds, refusals, full, late
        self.turns = Turns(limits)
        self.taken: TurnSource = self.turns  # or what stands before them
        self._health_turns = Turns(replace(limits, num_at_once=_NUM_HEALTH_CHECKS))

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:  # a stream asks for one message after the other
            return handler
        turns = self._health_turns if handler_call_details.method.startswith(_HEALTH_PREFIX) else self.taken
        parse = handler.request_deserializer
        if handler.response_streaming:

            async def stream(context: grpc.aio.ServicerContext) -> None:
                async with self._message(turns, parse, context) as message:
                    answer = handler.unary_stream(message, context)
                    if hasattr(answer, "__aiter__"):
                        async for response in answer:
                            await context.write(response)
                    else:
                        await answer

            return grpc.stream_stream_rpc_method_handler(_dropping(stream), None, handler.response_serializer)

        async def unary(context: grpc.aio.ServicerContext) -> Any:
            async with self._message(turns, parse, context) as message:
                return await handler.unary_unary(message, context)

        return grpc.stream_unary_rpc_method_handler(_dropping(unary), None, handler.response_serializer)

    @asynccontextmanager
    async def _message(
        self, turns: TurnSource, parse: Callable[[bytes], Any] | None, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        """The call's message, or the end of the call."""
        try:
            async with turns.turn(context.peer()) as place:
                try:
                    async with asyncio.timeout(self._seconds):
                        raw = await context.read()
                except TimeoutError:
                    await self._refusals.abort(context, self._late(self._seconds))
                if raw is EOF:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
                if len(raw) <= SMALL_BYTES:
                    place.leave()
                yield raw if parse is None else parse(raw)
        except TooManyWaiting as error:
            await self._refusals.abort(context, self._full(error.limit))


def _dropping(answer: Callable[[grpc.aio.ServicerContext], Awaitable[Any]]) -> Any:
    """A handler that calls `answer`, and keeps no message of a call that fails.

    gRPC's state of a call refers to the exception that ended it, the exception to the frames that it passed, and one of them to
    that state: a circle, which holds the message until Python looks for circles.
    """

    async def handle(messages: object, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await answer(context)
        except BaseException as error:
            forget_frames(error)
            del messages, context  # this frame is one of them
            raise

    return handle


def forget_frames(error: BaseException) -> None:
    """Makes an error that was reported hold nothing of the call that it ended, whatever still refers to it."""
    failed: BaseException | None = error
    while failed is not None:
        traceback.clear_frames(failed.__traceback__)
        failed.__traceback__ = None
        failed = failed.__context__
