"""The one place that makes calls: one channel to one target, an explicit deadline on each call, repeats of UNAVAILABLE.

Transport is for threads, AsyncTransport for asyncio; a call that is abandoned is cancelled explicitly, because grpcio leaves it
running. Failures come out as KvkeeperError.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cached_property
from typing import Any

import grpc
import grpc.aio

from kvkeeper.client.credentials import Credentials, TokenChannel
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.reach import Reach
from kvkeeper.client.retry import CallOptions, Patience
from kvkeeper.common import tracing

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),  # ReadKv and long block tables; requests are bounded by the service
    ("grpc.initial_reconnect_backoff_ms", 20),  # a cut stream must be back within the session's grace of 500 ms
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),  # a channel's backoff is its own
    ("grpc.enable_http_proxy", 0),
    # A call without a deadline ends where the peer is gone or stopped: unanswered pings make it UNAVAILABLE.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Transport:
    """Calls to one service of one target from threads. Connects with the first call."""

    def __init__(self, target: str, options: CallOptions, stub_class: Any, credentials: Credentials | None = None) -> None:
        """credentials: None takes those of the environment. Raises KvkeeperError where they cannot be used."""
        self.target = target
        self.options = options
        self.credentials = Credentials.of_environment() if credentials is None else credentials
        tls = self.credentials.tls_to(target)
        if tls is None:
            channel = grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        else:
            channel = grpc.secure_channel(target, tls, options=_CHANNEL_OPTIONS)
        self.channel: Any = TokenChannel(channel, self.credentials) if self.credentials.has_token else channel
        self.reach = Reach.by_stub(stub_class, target, uses_tls=tls is not None)
        self.stub = stub_class(self.channel)
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        self.channel.close()

    def call(self, method: Any, request: Any, options: CallOptions | None = None) -> Any:
        """The answer to a unary request, or to a list of them where the method takes a stream."""
        return self._repeat(options, lambda left: method(_requests(request), timeout=left, metadata=tracing.outgoing()))

    def collect(self, method: Any, request: Any, options: CallOptions | None = None) -> list[Any]:
        """All answers of a server stream; a repeat starts it over."""
        return self._repeat(options, lambda left: list(method(request, timeout=left, metadata=tracing.outgoing())))

    def stream(
        self, method: Any, request: Any, options: CallOptions | None = None, metadata: tracing.Metadata | None = None
    ) -> "Stream":
        return Stream(self, method, request, options or self.options, metadata)

    def _repeat(self, options: CallOptions | None, attempt: Callable[[float | None], Any]) -> Any:
        patience = Patience(options or self.options, time.monotonic())
        while True:
            try:
                return attempt(patience.left(time.monotonic()))
            except grpc.RpcError as failure:
                error = self.reach.error_of(failure, is_ours=self.is_closed)
                pause = patience.pause_after(error, time.monotonic())
                if pause is None:
                    raise error from None
            time.sleep(pause)


class Stream:
    """Answers of a server stream, one by one. Repeated only while nothing has been received."""

    def __init__(
        self, transport: Transport, method: Any, request: Any, options: CallOptions, metadata: tracing.Metadata | None = None
    ) -> None:
        self._transport = transport
        self._patience = Patience(options, time.monotonic())
        self._start = lambda: method(request, timeout=self._patience.left(time.monotonic()), metadata=metadata)
        self._call = self._start()
        self._received = self._is_cancelled = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                message = next(self._call)
            except grpc.RpcError as failure:
                is_ours = self._is_cancelled or self._transport.is_closed
                error = self._transport.reach.error_of(failure, is_ours=is_ours)
                pause = None if self._received else self._patience.pause_after(error, time.monotonic())
                if pause is None:
                    raise error from None
                time.sleep(pause)
                self._call = self._start()
            else:
                self._received = True
                return message

    def cancel(self) -> None:
        self._is_cancelled = True
        self._call.cancel()


class AsyncTransport:
    """Calls to one service of one target from one event loop. May be built before the loop runs."""

    def __init__(self, target: str, options: CallOptions, stub_class: Any, credentials: Credentials | None = None) -> None:
        """credentials: None takes those of the environment. Raises KvkeeperError where they cannot be used."""
        self.target = target
        self.options = options
        self.credentials = Credentials.of_environment() if credentials is None else credentials
        self._tls = self.credentials.tls_to(target)
        self._stub_class = stub_class
        self.reach = Reach.by_stub(stub_class, target, uses_tls=self._tls is not None)

    @cached_property
    def channel(self) -> Any:
        if self._tls is None:
            channel = grpc.aio.insecure_channel(self.target, options=_CHANNEL_OPTIONS)
        else:
            channel = grpc.aio.secure_channel(self.target, self._tls, options=_CHANNEL_OPTIONS)
        return TokenChannel(channel, self.credentials) if self.credentials.has_token else channel

    @cached_property
    def stub(self) -> Any:
        return self._stub_class(self.channel)

    async def close(self) -> None:
        if "channel" in self.__dict__:
            await self.channel.close(None)

    async def call(self, method: Any, request: Any, options: CallOptions | None = None) -> Any:
        """The answer to a unary request, or to a list of them where the method takes a stream."""

        async def attempt(left: float | None) -> Any:
            call = method(_requests(request), timeout=left, metadata=tracing.outgoing())
            try:
                return await call
            finally:
                call.cancel()  # does nothing to a call that has ended

        return await self._repeat(options, attempt)

    async def collect(self, method: Any, request: Any, options: CallOptions | None = None) -> list[Any]:
        """All answers of a server stream; a repeat starts it over."""

        async def attempt(left: float | None) -> list[Any]:
            call = method(request, timeout=left, metadata=tracing.outgoing())
            try:
                return [message async for message in call]
            finally:
                call.cancel()

        return await self._repeat(options, attempt)

    def stream(
        self, method: Any, request: Any, options: CallOptions | None = None, metadata: tracing.Metadata | None = None
    ) -> "AsyncStream":
        return AsyncStream(self.reach, method, request, options or self.options, metadata)

    async def _repeat(self, options: CallOptions | None, attempt: Callable[[float | None], Any]) -> Any:
        patience = Patience(options or self.options, time.monotonic())
        while True:
            try:
                return await attempt(patience.left(time.monotonic()))
            except grpc.RpcError as failure:
                error = self.reach.error_of(failure)
                pause = patience.pause_after(error, time.monotonic())
                if pause is None:
                    raise error from None
            await asyncio.sleep(pause)


class AsyncStream:
    """Answers of a server stream, one by one. Repeated only while nothing has been received."""

    def __init__(
        self, reach: Reach, method: Any, request: Any, options: CallOptions, metadata: tracing.Metadata | None = None
    ) -> None:
        self._reach = reach
        self._patience = Patience(options, time.monotonic())
        self._make_call = lambda: method(request, timeout=self._patience.left(time.monotonic()), metadata=metadata)
        self._received = self._is_cancelled = False
        self._start()

    async def _start_again(self, error: KvkeeperError) -> None:
        """After a pause. Raises the error where that is no use."""
        pause = None if self._received else self._patience.pause_after(error, time.monotonic())
        if pause is None:
            raise error from None
        await asyncio.sleep(pause)
        self._start()

    def _start(self) -> None:
        self._call = self._make_call()
        self._messages = self._call.__aiter__()  # not read(), which skips messages that came before an error status

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                message = await self._messages.__anext__()
            except grpc.RpcError as failure:
                await self._start_again(self._reach.error_of(failure, is_ours=self._is_cancelled))
            except KvkeeperError as error:  # of a call that shares one with others
                await self._start_again(error)
            except BaseException:
                self.cancel()
                raise
            else:
                self._received = True
                return message

    def cancel(self) -> None:
        self._is_cancelled = True
        self._call.cancel()


def _requests(request: Any) -> Any:
    """A stream of requests is given as a list, so that a repeat can send it again."""
    return iter(request) if isinstance(request, list) else request
