"""How a client waits: on the event loop that runs, or in its caller's thread. The clients themselves are written once.

All of them are coroutines. With a BlockingBackend every wait is a blocking one of grpc, of a socket or of a sleep, so that no
coroutine ever suspends: `run` has its result in one go, in the thread of its caller, with no event loop and no thread of ours.
It is done so because a step from another thread costs twice its processor time. `blocking` makes a method of a synchronous
client from that of the asyncio client, with its arguments, types and docstring.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

import grpc
import grpc.aio

from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.step_lane import BlockingStepLane, StepLane

P = ParamSpec("P")
T = TypeVar("T")


class AsyncioBackend:
    """Waits on the running loop. A call that is abandoned is cancelled explicitly, because grpcio leaves it running."""

    has_loop = True

    def channel(self, target: str, tls: grpc.ChannelCredentials | None, options: Any) -> Any:
        if tls is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, tls, options=options)

    async def close(self, channel: Any) -> None:
        await channel.close(None)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def call(self, method: Any, request: Any, timeout_s: float | None, metadata: Any) -> Any:
        """The answer to a unary request, or to an iterator of them where the method takes a stream."""
        call = method(request, timeout=timeout_s, metadata=metadata)
        try:
            return await call
        finally:
            call.cancel()  # does nothing to a call that has ended

    async def collect(self, method: Any, request: Any, timeout_s: float | None, metadata: Any) -> list[Any]:
        """All answers of a server stream."""
        call = method(request, timeout=timeout_s, metadata=metadata)
        try:
            return [message async for message in call]
        finally:
            call.cancel()

    def reader(self, call: Any) -> Callable[[], Awaitable[Any]]:
        """Gives the next message of a call each time. Not read(), which skips messages that came before an error status."""
        return call.__aiter__().__anext__

    def lane(self, connection: socket.socket, timeout_s: float) -> StepLane:
        """A step lane, which knows no time limit: StepCarriers ends it."""
        return StepLane(connection)

    async def in_thread(self, function: Callable[[], T], give_up: Callable[[T], object]) -> T:
        """The result of a blocking function. When this is cancelled the thread goes on, and its result is given up.

        Raises KvkeeperError where the host gives no thread.
        """
        try:
            running = asyncio.get_running_loop().run_in_executor(None, function)
        except RuntimeError as error:
            raise KvkeeperError(grpc.StatusCode.UNAVAILABLE, "HOST_EXHAUSTED", f"no thread to attach in: {error}") from None

        def give_up_unwanted(ended: "asyncio.Future[T]") -> None:
            if not ended.cancelled() and ended.exception() is None:
                give_up(ended.result())

        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.add_done_callback(give_up_unwanted)
            raise


class BlockingBackend:
    """Waits in the thread of the caller. The methods are those of AsyncioBackend, and none of them suspends."""

    has_loop = False

    def channel(self, target: str, tls: grpc.ChannelCredentials | None, options: Any) -> Any:
        if tls is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, tls, options=options)

    async def close(self, channel: Any) -> None:
        channel.close()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  there is no loop

    async def call(self, method: Any, request: Any, timeout_s: float | None, metadata: Any) -> Any:
        return method(request, timeout=timeout_s, metadata=metadata)

    async def collect(self, method: Any, request: Any, timeout_s: float | None, metadata: Any) -> list[Any]:
        return list(method(request, timeout=timeout_s, metadata=metadata))

    def reader(self, call: Any) -> Callable[[], Awaitable[Any]]:
        async def read() -> Any:
            try:
                return next(call)
            except StopIteration:
                raise StopAsyncIteration from None

        return read

    def lane(self, connection: socket.socket, timeout_s: float) -> BlockingStepLane:
        return BlockingStepLane(connection, timeout_s)

    async def in_thread(self, function: Callable[[], T], give_up: Callable[[T], object]) -> T:
        return function()


Backend = AsyncioBackend | BlockingBackend
ASYNCIO, BLOCKING = AsyncioBackend(), BlockingBackend()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits through a BlockingBackend alone."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError("a blocking call waited for an event loop")


class _Closes(Protocol):
    def close(self) -> object: ...


class Closing:
    """A client for threads, which its `with` closes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self: _Closes, *_: object) -> None:
        self.close()


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The same method for threads, of a class whose `_inner` has a BlockingBackend."""

    @wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self._inner, *args, **kwargs))

    return call
