"""ManyStreams: the Generate streams of one asyncio client over one call (GenerateMany).

A stream each costs client and engine more than the tokens in it. Requests that begin together leave in one message, and their
answers come in common ones. Where an engine has no such call, or none left, a request is sent in a call of its own. The call is
opened with the first request and ended once there has been none for a while.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from kvkeeper.client.engine.calls import OutputChunk
from kvkeeper.client.errors import KvkeeperError, parse_error
from kvkeeper.client.reach import Reach
from kvkeeper.client.transport import AsyncTransport
from kvkeeper.common import tracing
from kvkeeper.engine.v1 import engine_service_pb2 as pb

_IDLE_S = 2.0  # without a request, after which the call ends
_MOST_BYTES = 1 << 20  # of requests in one message, and of a request that is sent with others
_MOST_UNREAD = 1 << 16  # tokens and log probabilities of one stream, as the engine has it

# What grpc.aio says of a call, in place of the refusal, where that came while the call's first message was written.
_REFUSED_AT_WRITE = "Internal error from Core"

Answer = pb.GenerateResponse | OutputChunk  # what is tokens and text alone comes as columns, so it is no message


class ManyStreams:
    """The streams to one engine. method() makes one, as a stub's method makes a call."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self._is_unknown = False  # the engine has no such call
        self._call: _Call | None = None

    def method(self, request: pb.GenerateRequest, timeout: float | None, metadata: tracing.Metadata | None) -> Any:
        """The answers of a Generate. It has what AsyncStream needs of a call; timeout: seconds."""
        if self._is_unknown or metadata is not None or request.ByteSize() > _MOST_BYTES:
            return self._transport.stub.Generate(request, timeout=timeout, metadata=metadata)
        if self._call is None or self._call.has_ended:
            self._call = _Call(self._transport.stub.GenerateMany(), self._transport.reach)
        return _Numbered(self, self._call, request, timeout)

    def own_call(self, error: KvkeeperError, request: pb.GenerateRequest, timeout: float | None) -> Any | None:
        """A call of the request alone, where the error says that there is no common one; None: the error says another thing."""
        if not error.reason and error.code is grpc.StatusCode.UNIMPLEMENTED:
            self._is_unknown = True
        elif not _is_refusal(error):
            return None
        return self._transport.stub.Generate(request, timeout=timeout)

    def close(self) -> None:
        """End the call, and with it its requests."""
        if self._call is not None:
            self._call.close()


class _Call:
    """One GenerateMany call and its open streams."""

    def __init__(self, call: Any, reach: Reach) -> None:
        self._call = call
        self._reach = reach
        self._streams: dict[int, _Numbered] = {}
        self._last_number = 0
        self._to_begin: list[pb.NumberedRequest] = []
        self._to_cancel: list[int] = []
        self._has_news = asyncio.Event()  # for the service
        self._idle: asyncio.TimerHandle | None = None
        self.has_ended = False
        self._tasks = [asyncio.ensure_future(work) for work in (self._write(), self._read())]

    def begin(self, stream: "_Numbered", request: pb.GenerateRequest) -> int:
        """The number of the stream."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._last_number += 1
        self._streams[self._last_number] = stream
        self._to_begin.append(pb.NumberedRequest(number=self._last_number, request=request))
        self._has_news.set()
        return self._last_number

    def drop(self, number: int, *, is_over: bool) -> None:
        """Nothing more of a stream is wanted; is_over: nothing comes."""
        if self._streams.pop(number, None) is None:
            return
        if not is_over:
            self._to_cancel.append(number)
            self._has_news.set()
        if not self._streams and not self.has_ended:
            self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self._end)

    def close(self) -> None:
        """End the call and what is open on it."""
        self._end()
        for task in self._tasks:
            task.cancel()
        self._call.cancel()

    def _end(self) -> None:
        """No stream begins on it any more. The writing task ends the client's side."""
        self.has_ended = True
        self._has_news.set()
        if self._idle is not None:
            self._idle.cancel()

    async def _write(self) -> None:
        try:
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                while self._to_begin or self._to_cancel:
                    await self._call.write(self._next_message())
                if self.has_ended:
                    await self._call.done_writing()
                    return
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reading task learns why

    def _next_message(self) -> pb.GenerateManyRequest:
        message = pb.GenerateManyRequest(cancel=self._to_cancel, reads_parts=True)
        self._to_cancel = []
        num_bytes = 0
        while self._to_begin and num_bytes <= _MOST_BYTES:
            one = self._to_begin.pop(0)
            if one.number in self._streams:
                message.begin.append(one)
                num_bytes += one.ByteSize()
        return message

    async def _read(self) -> None:
        error = KvkeeperError(grpc.StatusCode.UNAVAILABLE, message="the engine ended the call")
        try:
            async for message in self._call:
                for one in message.responses:
                    if (stream := self._streams.get(one.number)) is not None:
                        stream.take(one)
                if message.HasField("parts"):
                    self._take_parts(message.parts)
        except grpc.RpcError as failure:
            error = self._reach.to_error(failure)
        finally:
            self._end()
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.fail(error)

    def _take_parts(self, parts: pb.PlainParts) -> None:
        """Raises ValueError where the columns do not fit together."""
        token_ids, first = list(parts.token_ids), 0
        for number, count, text in zip(parts.numbers, parts.num_tokens, parts.texts or [""] * len(parts.numbers), strict=True):
            if (stream := self._streams.get(number)) is not None:
                stream.take_tokens(token_ids[first : first + count], text)
            first += count


class _Numbered:
    """The answers to one request, as a call gives them."""

    def __init__(self, streams: ManyStreams, call: _Call, request: pb.GenerateRequest, timeout: float | None) -> None:
        """timeout: seconds; None: none."""
        self._streams, self._call, self._request = streams, call, request
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._unread: deque[tuple[Answer, int]] = deque()  # and how much each is
        self._num_unread = 0
        self._error: KvkeeperError | None = None
        self._waiter: asyncio.Future[None] | None = None  # of what reads it
        self._is_cancelled = self._has_begun = self._has_ended = False
        self._own: Any = None  # a call of its own
        self._number = call.begin(self, request)

    def take(self, one: pb.NumberedResponse) -> None:
        """What came for it. It is not to wait: others' answers follow."""
        self._has_begun = True
        if one.HasField("error"):
            self.fail(parse_error(one.error))
            return
        response = one.response
        num_logprobs = sum(1 + len(each.top_token_ids) for each in response.logprobs)
        if response.HasField("usage"):
            self._has_ended = True
            self._call.drop(self._number, is_over=True)
        self._put(response, len(response.token_ids) + num_logprobs)

    def take_tokens(self, token_ids: list[int], text: str) -> None:
        """Tokens that came for it, and text alone."""
        self._put(OutputChunk(0, text, tuple(token_ids), None), len(token_ids))

    def _put(self, answer: Answer, num_units: int) -> None:
        self._unread.append((answer, num_units))
        self._num_unread += num_units
        self._wake()
        if self._num_unread > _MOST_UNREAD and not self._has_ended:
            self._unread.clear()
            self._call.drop(self._number, is_over=False)
            text = f"the client left more than {_MOST_UNREAD} tokens unread"
            self._error = KvkeeperError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "NOT_READ", text, metadata={"limit": str(_MOST_UNREAD)}
            )

    def fail(self, error: KvkeeperError) -> None:
        self._error = error
        self._call.drop(self._number, is_over=True)
        self._wake()

    def __aiter__(self) -> AsyncIterator[Answer]:
        return self._call_replies()

    async def _call_replies(self) -> AsyncIterator[Answer]:
        while True:
            while self._unread:
                answer, num_units = self._unread.popleft()
                self._num_unread -= num_units
                yield answer
            if self._has_ended:
                return
            if self._error is not None:
                break
            await self._wait()
        own = None if self._has_begun else self._streams.own_call(self._error, self._request, self.time_remaining())
        if own is None:
            raise self._error
        self._own = own
        async for response in own:
            yield response

    async def _wait(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            if self._deadline is None:
                await self._waiter
            else:
                async with asyncio.timeout(self.time_remaining()):
                    await self._waiter
        except TimeoutError:
            self._call.drop(self._number, is_over=False)
            raise KvkeeperError(grpc.StatusCode.DEADLINE_EXCEEDED, message="Deadline Exceeded") from None
        if self._is_cancelled:
            raise asyncio.CancelledError

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def time_remaining(self) -> float | None:
        """Seconds until its deadline; None: it has none."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def cancel(self) -> None:
        """Nothing more of it is wanted. Idempotent."""
        self._is_cancelled = True
        self._wake()
        self._call.drop(self._number, is_over=False)
        if self._own is not None:
            self._own.cancel()


def _is_refusal(error: KvkeeperError) -> bool:
    """Whether the engine has no room for another common call."""
    if not error.reason:
        return error.message == _REFUSED_AT_WRITE
    return error.reason == "QUEUE_FULL" and error.metadata.get("flag") == "--many-calls"
