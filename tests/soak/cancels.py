"""Row 26: a call is cancelled at every await, and nothing of it stays.

Both services in this process. Calls of the engine service are cancelled at each await of their handler in turn, at each await
of the client that makes them over a real channel, and after any number of turns of the event loop; many are cancelled at once;
and clients stop reading streams that are larger than any buffer. In the end no block, sequence, task or file descriptor is
missing, and the next request gets exactly its tokens.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import grpc
from google.protobuf.message import Message

from kvkeeper.client import AsyncEngineClient, GenerateOptions, Sampling
from kvkeeper.client.engine.calls import generate_request, submit_request
from kvkeeper.common.service import methods
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from kvkeeper.engine_service.server import RunningServer
from kvkeeper.engine_service.serving.front import Front, own_router
from tests.soak.row import Counts
from tests.support.processes.service_pair import Services, generate, services, toy_output, until
from tests.support.worlds.cancelling import cancelled_at

_NUM_TOKENS = 6
_NUM_BLOCKS = 128
_MOST_AWAITS = 200  # that any of the calls has
_TURNS = 40  # calls that are cancelled after some turns of the loop
_STORM = 60
_STORM_TURN_S = 0.002
_NUM_UNREAD, _UNREAD_TOKENS = 3, 60
_SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))  # a reader that is behind stops the writer
_PREFIX = "/kvkeeper.engine.v1.EngineService/"
Call = Callable[[], Coroutine[Any, Any, Any]]


async def run(seed: int) -> Counts:
    """Counts calls that were cancelled while they were under way, each a fault by itself."""
    with patch.object(methods, "log") as log:
        count = await _cancel_everything(random.Random(seed))
    assert not log.exception.called, f"a cancelled call looked like a bug: {log.exception.mock_calls}"
    return Counts(count, count)


async def _cancel_everything(rng: random.Random) -> int:
    async with services() as world:
        await world.start_cache(num_blocks=_NUM_BLOCKS)
        engine = await world.start_engine(chunk_size=4, token_budget=16)
        client = await world.client(engine)
        cancels = _Cancels(world, engine, client, rng)
        await cancels.check()
        before = _open_things()
        for part in (cancels.handlers, cancels.clients, cancels.turns, cancels.storm, cancels.unread):
            num_before = (await client.stats()).num_cancelled_requests
            await part()
            await cancels.check()
            if part in (cancels.handlers, cancels.clients):  # which requests the others hit is a matter of time
                assert (await client.stats()).num_cancelled_requests > num_before, "a cancelled call's request went on"
            await until(lambda: _is_back(before))
        return cancels.count


async def _is_back(before: tuple[int, int]) -> bool:
    """Fewer than before are fine: what earlier work in this process left is collected meanwhile."""
    return all(now <= then for now, then in zip(_open_things(), before, strict=True))


def _open_things() -> tuple[int, int]:
    """(file descriptors, tasks)"""
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())


class _Context:
    """What a handler sees of its call. A write takes a turn of the loop."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "unix:"

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(0)

    async def abort_with_status(self, status: Any) -> None:
        raise _Refused(status.details)


class _Refused(Exception):
    """The handler refused."""


@dataclass(frozen=True)
class _Details:
    """What the server knows of a call before it begins."""

    method: str


class _Cancels:
    """The parts of a unit; count is the number of calls that were hit."""

    def __init__(self, world: Services, engine: RunningServer, client: AsyncEngineClient, rng: random.Random) -> None:
        self.count = 0
        self._world, self._engine, self._client, self._rng = world, engine, client, rng
        self._num_ids = 0
        (handle,) = engine._fronts._fronts
        front: Front = handle.runner._front  # type: ignore[union-attr]  # it is in this process
        self._router = own_router(front._streams, front._link, 1 << 20)

    def _new_id(self) -> str:
        self._num_ids += 1
        return f"r{self._num_ids}"

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(3) for _ in range(self._rng.choice([3, 4, 5, 9]))]

    def _options(self, n: int = 1) -> GenerateOptions:
        sampling = Sampling(max_tokens=_NUM_TOKENS, temperature=0, repetition_penalty=1.0)
        return GenerateOptions(n=n, request_id=self._new_id(), sampling=sampling)

    async def check(self) -> None:
        """The engine and the pool are at rest, and a request gets its tokens."""
        prompt = self._prompt()
        assert (await generate(self._client, prompt)).token_ids == [toy_output(prompt, 8)]

        async def engine_at_rest() -> bool:
            return self._engine.engine.scheduler.is_empty and not self._engine.engine.requests.generations

        await until(engine_at_rest)
        pool = await self._world.wait_idle()
        assert pool.num_referenced_blocks == 0
        assert pool.num_free_blocks + pool.num_cached_blocks == _NUM_BLOCKS - 1

    # -- parts

    async def handlers(self) -> None:
        """Each method's handler, as the server runs it."""
        await self._each(lambda: self._handled("Generate", generate_request(self._prompt(), self._options(n=2))))
        await self._each(lambda: self._handled("Generate", generate_request("refused", self._options())))
        await self._each(self._handled_submission)
        await self._submissions_are_one()

    async def clients(self) -> None:
        """What the asyncio client does, over a real channel."""

        async def read() -> None:
            async with self._client.generate(self._prompt(), self._options(n=2)) as generation:
                async for _ in generation:
                    pass

        async def submit() -> None:
            await self._client.result(await self._client.submit(self._prompt(), self._options()), wait_s=60)

        await self._each(read)
        await self._each(submit)
        await self._each(self._client.stats)

    async def turns(self) -> None:
        """Streams, one after the other, after any number of turns of the loop."""
        async with grpc.aio.insecure_channel(self._engine.address) as channel:
            stub = pb_grpc.EngineServiceStub(channel)
            num_turns = await self._cancelled_after(None, stub)
            for _ in range(_TURNS):
                await self._cancelled_after(self._rng.randrange(num_turns), stub)

    async def storm(self) -> None:
        """Many streams at once, each at its own time, on a pool that has not room for all."""
        async with grpc.aio.insecure_channel(self._engine.address) as channel:
            stub = pb_grpc.EngineServiceStub(channel)
            turns = await asyncio.gather(*(self._cancelled_after(None, stub, _STORM_TURN_S) for _ in range(_STORM)))
            ends = [self._rng.randrange(max(turns)) for _ in range(_STORM)]
            await asyncio.gather(*(self._cancelled_after(end, stub, _STORM_TURN_S) for end in ends))

    async def unread(self) -> None:
        """Clients that stop reading: their requests end all the same, and others' go on."""
        async with grpc.aio.insecure_channel(self._engine.address, options=_SMALL_WINDOW) as channel:
            stub = pb_grpc.EngineServiceStub(channel)
            sampling = Sampling(max_tokens=_UNREAD_TOKENS, temperature=0, repetition_penalty=1.0, num_logprobs=20)
            requests = [generate_request([place], GenerateOptions(n=4, sampling=sampling)) for place in range(_NUM_UNREAD)]
            calls = [stub.Generate(request, timeout=60) for request in requests]
            for call in calls:
                await call.read()
            await self.check()
            assert self._engine.service.num_streams == len(calls), "a client that does not read was sent everything"
            for call in calls:
                call.cancel()
        self.count += len(calls)

    # -- their means

    async def _each(self, call: Call) -> None:
        """At each of its awaits, to its end."""
        for nth in range(1, _MOST_AWAITS):
            was_hit, _ = await cancelled_at(nth, call())
            if not was_hit:
                return
            self.count += 1
        raise AssertionError("the call does not end")

    async def _handled(self, method: str, request: Message) -> None:
        handler: Any = self._router.service(_Details(_PREFIX + method))
        run = handler.unary_stream or handler.unary_unary
        with contextlib.suppress(_Refused):
            await run(request.SerializeToString(), _Context())

    async def _handled_submission(self) -> None:
        request = submit_request(self._prompt(), self._options())
        await self._handled("SubmitRequest", request)
        await self._handled("GetRequest", pb.GetRequestRequest(request_id=request.request.request_id, wait_ms=60_000))

    async def _submissions_are_one(self) -> None:
        """Whether a submission that was cancelled has been taken or not: the same again is the same request."""
        for nth in range(1, _MOST_AWAITS):
            prompt, options = self._prompt(), self._options()
            request = submit_request(prompt, options)
            was_hit, _ = await cancelled_at(nth, self._handled("SubmitRequest", request))
            assert await self._client.submit(prompt, options) == options.request_id
            result = await self._client.result(options.request_id, wait_s=60)
            assert [list(output.token_ids) for output in result.outputs] == [toy_output(prompt, _NUM_TOKENS)]
            if not was_hit:
                return
            self.count += 1

    async def _cancelled_after(self, num_turns: int | None, stub: Any, turn_s: float = 0.0) -> int:
        """A stream that is cancelled after so many turns of the loop, or read to its end. The turns that it lasted.

        turn_s: how long a turn is at least; many that spin at once would leave the engine's thread no time to compute.
        """
        call = stub.Generate(generate_request(self._prompt(), self._options(n=self._rng.choice([1, 2]))), timeout=60)
        reading = asyncio.create_task(_read_all(call))
        count = 0
        while not reading.done() and count != num_turns:
            await asyncio.sleep(turn_s)
            count += 1
        self.count += call.cancel()
        await reading
        return count


async def _read_all(call: Any) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:  # which of the two comes is a matter of time
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise
