"""The engine service for asyncio: text in, text out.

generate() gives a stream of chunks; its usage is set when it has ended. Leave it through `with` or close(): that cancels a
stream left early, which frees the request's blocks. follow() gives such a stream of a submitted request, which continues
without it. Every call raises KvkeeperError. client_sync.py has the same for threads.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from kvkeeper.client.backends import ASYNCIO, Backend
from kvkeeper.client.credentials import Credentials
from kvkeeper.client.engine.calls import (
    GenerateOptions,
    OutputChunk,
    Result,
    Usage,
    generate_request,
    get_request,
    parse_chunk,
    parse_result,
    parse_usage,
    stream_options,
    stream_request,
    submit_request,
    tokenize_request,
)
from kvkeeper.client.engine.many import ManyStreams
from kvkeeper.client.engine.prompts import Chat, Prompt
from kvkeeper.client.engine.resubmit import PAUSE_S, Received, address_in, repeatable
from kvkeeper.client.engine.spans import GenerateSpan, begin_generate
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.retry import CallOptions
from kvkeeper.client.targets import engine_address
from kvkeeper.client.transport import AsyncStream, AsyncTransport
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc


class AsyncEngineClient:
    """One channel to an engine service. target is host:port or unix:/path; connects with the first call.

    Without one it is KVKEEPER_ENGINE_LISTEN, or else the default of the service.
    """

    def __init__(
        self,
        target: str | None = None,
        options: CallOptions | None = None,
        credentials: Credentials | None = None,
        *,
        backend: Backend = ASYNCIO,
    ) -> None:
        """credentials: None takes those of the environment. Raises KvkeeperError where they cannot be used.

        backend: how calls wait; EngineClient gives another one.
        """
        self._transport = AsyncTransport(
            target or engine_address(), options or CallOptions(), pb_grpc.EngineServiceStub, credentials, backend
        )
        self._others: dict[str, AsyncTransport] = {}  # by address, to engines that took over from the first
        self._many: dict[AsyncTransport, ManyStreams] = {}
        self._moved: dict[str, str] = {}  # by id of a submitted request, the address of the engine that took it over
        self._tasks: set[asyncio.Task[None]] = set()  # of call_back

    async def __aenter__(self) -> "AsyncEngineClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def generate(self, prompt: Prompt, options: GenerateOptions | None = None) -> "AsyncGeneration":
        """Continue a prompt: text, token ids, or a conversation: a Chat, or its messages."""
        options = repeatable(options or GenerateOptions())
        request = generate_request(prompt, options)
        patience = stream_options(self._transport.options, options.timeout_ms)
        span = begin_generate(options)
        start = partial(self._start, request, patience, span)
        return AsyncGeneration(start, self._transport.backend.sleep, Received(options.resubmit_s), span)

    async def submit(self, prompt: Prompt, options: GenerateOptions | None = None) -> str:
        """Have a prompt continued without staying connected. Returns the id of its results; safe to repeat with one id."""
        request = submit_request(prompt, options or GenerateOptions())
        return (await self._transport.call_by_name("SubmitRequest", request)).request_id

    def follow(self, request_id: str, reconnect_s: float = 10.0) -> "AsyncGeneration":
        """The output of a submitted request from its beginning, as it comes.

        Where the connection breaks, the stream continues from there; reconnect_s: for how long the engine may be away.
        """
        patience, span = stream_options(self._transport.options, None), GenerateSpan(None)
        received = Received(reconnect_s, is_submitted=True, request_id=request_id, is_followed=True)
        start = partial(self._start, None, patience, span)
        return AsyncGeneration(start, self._transport.backend.sleep, received, span)

    async def result(self, request_id: str, wait_s: float = 0.0) -> Result:
        """The output of a submitted request so far: when it has ended, or after wait_s at the latest."""
        deadline = time.monotonic() + wait_s
        while True:
            left = deadline - time.monotonic()
            try:
                transport = self._transport_to(self._moved.get(request_id, ""))
                request = get_request(request_id, left, transport.options)
                found = parse_result(await transport.call(transport.stub.GetRequest, request))
            except KvkeeperError as error:
                if not (address := address_in(error)):
                    raise
                self._moved[request_id] = address
                continue
            if found.has_ended or time.monotonic() >= deadline:
                return found

    def call_back(
        self,
        prompt: Prompt,
        on_chunk: Callable[[OutputChunk], None],
        on_end: Callable[[Usage | KvkeeperError], None],
        options: GenerateOptions | None = None,
    ) -> "AsyncGeneration":
        """Continue a prompt in the background: on_chunk gets each chunk, on_end the usage or the error, exactly once.

        The two are called one at a time, and a slow one delays this request alone. close() ends the request early.
        """
        generation = self.generate(prompt, options)
        task = asyncio.get_running_loop().create_task(call_back(generation, on_chunk, on_end))
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)
        return generation

    async def iteration_plan(self) -> pb.GetIterationPlanResponse:
        """The engine's last iteration: the requests in it and their tokens; `plan` is a text for people."""
        return await self._transport.call_by_name("GetIterationPlan", pb.GetIterationPlanRequest())

    async def cancel(self, request_id: str) -> None:
        """End a request that waits or runs."""
        await self._transport.call_by_name("CancelRequest", pb.CancelRequestRequest(request_id=request_id))

    async def tokenize(self, prompt: str | Chat) -> tuple[int, ...]:
        """The tokens of a text, or of a conversation."""
        return tuple((await self._transport.call_by_name("Tokenize", tokenize_request(prompt))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """The text of these tokens. keep_special_tokens includes the tokens that `tokenize` puts around a text."""
        request = pb.DetokenizeRequest(token_ids=token_ids, keep_special_tokens=keep_special_tokens)
        return (await self._transport.call_by_name("Detokenize", request)).text

    async def pieces(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """What each of at most 4096 tokens stands for by itself; it may be a part of a character."""
        request = pb.DetokenizeRequest(token_ids=token_ids, with_pieces=True, keep_special_tokens=True)
        return tuple((await self._transport.call_by_name("Detokenize", request)).pieces)

    async def model(self) -> pb.GetModelResponse:
        return await self._transport.call_by_name("GetModel", pb.GetModelRequest())

    async def stats(self) -> pb.GetStatsResponse:
        return await self._transport.call_by_name("GetStats", pb.GetStatsRequest())

    async def list_requests(self, session_id: str = "") -> tuple[pb.RequestInfo, ...]:
        """Requests that wait or run, of one conversation or of all, in order of arrival."""
        request = pb.ListRequestsRequest(session_id=session_id)
        return await self._transport.list_all("ListRequests", request, "requests")

    async def close(self) -> None:
        for streams in self._many.values():
            streams.close()
        for transport in (self._transport, *self._others.values()):
            await transport.close()

    def _transport_to(self, address: str) -> AsyncTransport:
        """The channel to an engine that took over; empty: to the client's own."""
        if not address:
            return self._transport
        if address not in self._others:
            self._others[address] = AsyncTransport(
                address,
                self._transport.options,
                pb_grpc.EngineServiceStub,
                self._transport.credentials,
                self._transport.backend,
            )
        return self._others[address]

    def _start(
        self, request: pb.GenerateRequest | None, patience: CallOptions, span: GenerateSpan, received: Received
    ) -> AsyncStream:
        """The stream of a request, or the rest of it; request: None where it was submitted."""
        transport = self._transport_to(received.address)
        if received.is_followed or request is None:
            rest = stream_request(received.request_id, received.outputs())
            return transport.stream(transport.stub.StreamRequest, rest, patience, span.metadata)
        if not transport.backend.has_loop:  # threads share no call
            return transport.stream(transport.stub.Generate, request, patience, span.metadata)
        if transport not in self._many:
            self._many[transport] = ManyStreams(transport)
        return transport.stream(self._many[transport].method, request, patience, span.metadata)


class AsyncGeneration:
    """The chunks of one request as they come. request_id is set with the first chunk, usage after the last."""

    def __init__(
        self,
        start: Callable[[Received], AsyncStream],
        sleep: Callable[[float], Awaitable[None]],
        received: Received,
        span: GenerateSpan,
    ) -> None:
        """start: of a stream, which begins behind what was received where that says so. sleep: for seconds."""
        self._start = start
        self._sleep = sleep
        self._span = span
        self._stream = start(received)
        self._received = received
        self.request_id = ""
        self.usage: Usage | None = None

    async def __aenter__(self) -> "AsyncGeneration":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[OutputChunk]:
        return self

    async def __anext__(self) -> OutputChunk:
        while True:
            try:
                message = await self._stream.__anext__()
            except KvkeeperError as error:
                if self._received.may_follow(error):
                    self._stream = self._start(self._received)
                    continue
                if not self._received.may_ask_again(error, time.monotonic()):
                    self._span.fail(error)
                    raise
                self._span.repeat()
                await self._sleep(PAUSE_S)
                self._stream = self._start(self._received)
                continue
            if isinstance(message, OutputChunk):  # tokens and text alone, of a call of many requests
                chunk = self._received.new_part(message)
            else:
                self.request_id = message.request_id or self.request_id
                self.usage = parse_usage(message) or self.usage
                self._span.record_answer(message)
                chunk = self._received.new_part(parse_chunk(message))
            if chunk is not None:
                return chunk

    def close(self) -> None:
        """End the stream, and with it a request of generate() that still runs."""
        self._stream.cancel()
        self._span.end()


async def call_back(
    generation: AsyncGeneration, on_chunk: Callable[[OutputChunk], None], on_end: Callable[[Usage | KvkeeperError], None]
) -> None:
    """Calls on_chunk with each chunk, and on_end with the usage or the error."""
    try:
        async for chunk in generation:
            on_chunk(chunk)
    except KvkeeperError as error:
        on_end(error)
        return
    finally:
        generation.close()
    assert generation.usage is not None, "a stream that ended without an error has its usage"
    on_end(generation.usage)
