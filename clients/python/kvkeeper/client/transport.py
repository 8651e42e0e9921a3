"""The one place that makes calls: one channel to one target, an explicit deadline on each call, repeats of UNAVAILABLE.

Whether a call waits on an event loop or in its caller's thread is the backend's. Failures come out as KvkeeperError.
"""

import time
from collections.abc import AsyncIterator, Iterator
from functools import cached_property
from typing import Any

import grpc

from kvkeeper.client.backends import ASYNCIO, Backend, run
from kvkeeper.client.credentials import Credentials, TokenChannel
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.reach import Reach
from kvkeeper.client.retry import CallOptions, Patience
from kvkeeper.common import tracing

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),  # ReadKv and long block tables; requests are bounded by the service
    ("grpc.initial_reconnect_backoff_ms", 20),  # a cut stream must be back within the session's grace of 500 ms
    ("grpc.max_reconnect_backoff_ms", 100),  # a service that is started again is found soon after it listens
    ("grpc.use_local_subchannel_pool", 1),  # a channel's backoff is its own
    ("grpc.enable_http_proxy", 0),
    # A call without a deadline ends where the peer is gone or stopped: unanswered pings make it UNAVAILABLE.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)

_PAGE_SIZE = 1000


class AsyncTransport:
    """Calls to one service of one target. Connects with the first call.

    With an event loop it is for one loop, and may be built before that runs; without one it is for threads.
    """

    def __init__(
        self,
        target: str,
        options: CallOptions,
        stub_class: Any,
        credentials: Credentials | None = None,
        backend: Backend = ASYNCIO,
    ) -> None:
        """credentials: None takes those of the environment. Raises KvkeeperError where they cannot be used."""
        self.target = target
        self.options = options
        self.backend = backend
        self.credentials = Credentials.of_environment() if credentials is None else credentials
        self._tls = self.credentials.tls_to(target)
        self._stub_class = stub_class
        self.reach = Reach.by_stub(stub_class, target, uses_tls=self._tls is not None)
        self.is_closed = False
        if not backend.has_loop:
            _ = self.stub  # threads share it

    @cached_property
    def channel(self) -> Any:
        channel = self.backend.channel(self.target, self._tls, _CHANNEL_OPTIONS)
        return TokenChannel(channel, self.credentials) if self.credentials.has_token else channel

    @cached_property
    def stub(self) -> Any:
        return self._stub_class(self.channel)

    async def close(self) -> None:
        self.is_closed = True
        if "channel" in self.__dict__:
            await self.backend.close(self.channel)

    async def call(self, method: Any, request: Any, options: CallOptions | None = None) -> Any:
        """The answer to a unary request, or to a list of them where the method takes a stream."""
        return await self._repeat(options, self.backend.call, method, request)

    async def call_by_name(self, method: str, request: Any, least_timeout_s: float = 0.0) -> Any:
        """The answer of a method of the stub. least_timeout_s: that it is waited for, whatever the options are."""
        return await self.call(getattr(self.stub, method), request, self.options.for_at_least(least_timeout_s))

    async def list_all(self, method: str, request: Any, rows: str) -> tuple[Any, ...]:
        """All rows of a method that lists them by pages. rows: their field in the answer."""
        found: list[Any] = []
        request.page_size = _PAGE_SIZE
        while True:
            page = await self.call_by_name(method, request)
            found += getattr(page, rows)
            if not page.next_page_token:
                return tuple(found)
            request.page_token = page.next_page_token

    async def collect(self, method: Any, request: Any, options: CallOptions | None = None) -> list[Any]:
        """All answers of a server stream; a repeat starts it over."""
        replies: list[Any] = await self._repeat(options, self.backend.collect, method, request)
        return replies

    async def call_once(self, method: Any, request: Any, timeout_s: float) -> Any:
        """The answer to a request that is not repeated here."""
        return await self._attempt(self.backend.call, method, request, timeout_s)

    def stream(
        self, method: Any, request: Any, options: CallOptions | None = None, metadata: tracing.Metadata | None = None
    ) -> "AsyncStream":
        return AsyncStream(self, method, request, options or self.options, metadata)

    async def _attempt(self, make: Any, method: Any, request: Any, timeout_s: float | None) -> Any:
        try:
            return await make(method, _requests(request), timeout_s, tracing.outgoing())
        except grpc.RpcError as failure:
            raise self.reach.to_error(failure, is_ours=self.is_closed) from None

    async def _repeat(self, options: CallOptions | None, make: Any, method: Any, request: Any) -> Any:
        patience = Patience(options or self.options, time.monotonic())
        while True:
            try:
                return await self._attempt(make, method, request, patience.left(time.monotonic()))
            except KvkeeperError as error:
                pause = patience.pause_after(error, time.monotonic())
                if pause is None:
                    raise
            await self.backend.sleep(pause)


class AsyncStream:
    """The answers of a server stream, one by one. Repeated only while nothing has been received."""

    def __init__(
        self,
        transport: AsyncTransport,
        method: Any,
        request: Any,
        options: CallOptions,
        metadata: tracing.Metadata | None = None,
    ) -> None:
        self._transport = transport
        self._patience = Patience(options, time.monotonic())
        self._make_call = lambda: method(request, timeout=self._patience.left(time.monotonic()), metadata=metadata)
        self._received = self._is_cancelled = False
        self._start()

    async def _start_again(self, error: KvkeeperError) -> None:
        """After a pause. Raises the error where that is no use."""
        pause = None if self._received else self._patience.pause_after(error, time.monotonic())
        if pause is None:
            raise error from None
        await self._transport.backend.sleep(pause)
        self._start()

    def _start(self) -> None:
        self._call = self._make_call()
        self._read = self._transport.backend.reader(self._call)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                message = await self._read()
            except grpc.RpcError as failure:
                is_ours = self._is_cancelled or self._transport.is_closed
                await self._start_again(self._transport.reach.to_error(failure, is_ours=is_ours))
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


class Stream:
    """An AsyncStream of a blocking transport, for threads. cancel() is for any thread."""

    def __init__(self, stream: AsyncStream) -> None:
        self._inner = stream
        self.cancel = stream.cancel

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return run_next(self._inner)


def run_next(iterator: Any) -> Any:
    """The next item of an asynchronous iterator that waits through a BlockingBackend alone. Raises StopIteration."""
    try:
        return run(iterator.__anext__())
    except StopAsyncIteration:
        raise StopIteration from None


def _requests(request: Any) -> Any:
    """A stream of requests is given as a list, so that a repeat can send it again."""
    return iter(request) if isinstance(request, list) else request
