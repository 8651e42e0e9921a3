"""What becomes of requests when either engine of a hand-over dies, is slow, or says what cannot be."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.client import AsyncEngineClient, GenerateOptions, Sampling
from kvkeeper.client.errors import to_error
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from kvkeeper.engine_service.cache_session.kv_spec import make_kv_spec
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.movement import take_over
from kvkeeper.engine_service.movement.messages import identity
from kvkeeper.engine_service.server import RunningServer
from kvkeeper.engine_service.values.errors import Draining
from tests.support.models.odd_models import LateGate
from tests.support.processes.engine_command import engine_process, logged, ready
from tests.support.processes.service_pair import BLOCK_SIZE, Services, generate, toy_output, until
from tests.support.worlds.cache_api import failure, refusal

PROMPT, OTHER, LONGER = [1, 2, 3], [1, 2, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9]
NUM_BEFORE, NUM_ALL = 6, 40
ELSEWHERE = "unix:/nowhere/at/all"


def request_of_this_model(address: str = ELSEWHERE) -> pb.HandOverRequest:
    return pb.HandOverRequest(address=address, engine=identity(load_served_model(EngineConfig(model=HASH_TOY))))


@asynccontextmanager
async def stub_of(engine: RunningServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(engine.address) as channel:
        yield pb_grpc.EngineServiceStub(channel)


class Giver:
    """An engine whose two requests stand in the middle of a step, and their clients."""

    def __init__(self, engine: RunningServer, gate: LateGate, asking: list[asyncio.Task[Any]]) -> None:
        self.engine, self.gate, self.asking = engine, gate, asking

    async def is_open(self) -> bool:
        """Whether it takes requests."""
        try:
            self.engine.engine.check_open()
        except Draining:
            return False
        return True

    async def is_closed(self) -> bool:
        return not await self.is_open()


@pytest.fixture
async def giver(world: Services) -> Giver:
    await world.start_cache()
    engine, gate = await world.start_late_engine(len(PROMPT) + NUM_BEFORE)
    client = await world.client(engine)
    asking: list[asyncio.Task[Any]] = []

    async def have_come() -> bool:
        return len(engine.engine.requests.generations) == len(asking)

    for prompt, request_id in ((PROMPT, "first"), (OTHER, "second")):
        asking.append(asyncio.create_task(generate(client, prompt, NUM_ALL, request_id=request_id)))
        await until(have_come)
    await gate.reached()
    return Giver(engine, gate, asking)


async def test_requests_go_on_where_they_are_when_the_taker_is_killed_before_it_confirms(giver: Giver) -> None:
    code = (
        "import sys, grpc\n"
        "from kvkeeper.engine.v1 import engine_service_pb2 as pb, engine_service_pb2_grpc as pb_grpc\n"
        "request = pb.HandOverRequest.FromString(bytes.fromhex(sys.argv[2]))\n"
        "for answer in pb_grpc.EngineServiceStub(grpc.insecure_channel(sys.argv[1])).HandOver(request):\n"
        "    print(answer.request.request.request_id, flush=True)\n"
    )
    raw = request_of_this_model().SerializeToString().hex()
    taker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, giver.engine.address, raw, env={"PYTHONPATH": ":".join(sys.path)}, stdout=PIPE
    )
    try:
        assert taker.stdout is not None
        said = [await asyncio.wait_for(taker.stdout.readline(), 20)]
        giver.gate.is_open.set()
        said += [await asyncio.wait_for(taker.stdout.readline(), 20) for _ in range(2)]
        assert said == [b"\n", b"first\n", b"second\n"]
        with pytest.raises(Draining):
            giver.engine.engine.check_open()
    finally:
        taker.kill()
        await taker.wait()
        taker._transport.close()  # type: ignore[attr-defined]  # its pipes would close after the loop
    found = [output.token_ids for output in await asyncio.gather(*giver.asking)]
    assert found == [[toy_output(PROMPT, NUM_ALL)], [toy_output(OTHER, NUM_ALL)]]
    await until(giver.is_open)
    assert giver.engine.engine.stats.num_handed_over_requests == 0


async def test_what_was_confirmed_is_gone_and_the_rest_goes_on(giver: Giver, world: Services) -> None:
    async with stub_of(giver.engine) as stub:
        stream = stub.HandOver(request_of_this_model())
        hand_over_id = (await stream.read()).hand_over_id
        giver.gate.is_open.set()
        handed = [(await stream.read()).request for _ in range(2)]
        tokens = list(handed[0].outputs[0].token_ids)
        assert NUM_BEFORE - 1 <= len(tokens) < NUM_ALL - 10
        assert tokens == toy_output(PROMPT, len(tokens))
        confirm = pb.ConfirmHandOverRequest(hand_over_id=hand_over_id, request_id="first", is_taken=True)
        await stub.ConfirmHandOver(confirm)
        await stub.ConfirmHandOver(confirm)  # its answer may have been lost
        for wrong in (
            pb.ConfirmHandOverRequest(hand_over_id="another", request_id="second", is_taken=True),
            pb.ConfirmHandOverRequest(hand_over_id=hand_over_id, request_id="third", is_taken=True),
        ):
            assert (await refusal(stub.ConfirmHandOver(wrong))).reason == "UNKNOWN_REQUEST"
        stream.cancel()
        assert (await giver.asking[1]).token_ids == [toy_output(OTHER, NUM_ALL)]
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ConfirmHandOver(pb.ConfirmHandOverRequest(hand_over_id=hand_over_id, request_id="second", is_taken=True))
    lost = await failure(giver.asking[0])
    assert lost.service_down, "its client looked for it where it went"
    await until(giver.is_open)
    assert (await generate(await world.client(giver.engine), [9])).token_ids == [toy_output([9], 8)]
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_a_taker_that_dies_with_the_blocks_leaves_the_tokens(giver: Giver, world: Services) -> None:
    """Its session took a sequence, but it did not confirm: the giver computes the tokens that it has again."""
    spec = make_kv_spec(load_served_model(EngineConfig(model=HASH_TOY)), BLOCK_SIZE)
    session = await (await world.cache_client()).open_session(spec, cache_pb.EXECUTOR_ENGINE, ttl_ms=60_000)
    async with stub_of(giver.engine) as stub:
        stream = stub.HandOver(request_of_this_model())
        await stream.read()
        giver.gate.is_open.set()
        offers = [(await stream.read()).request.outputs[0].offer for _ in range(2)]
        taken = await session.take(offers[0], 77)
        assert taken.num_committed_tokens >= len(PROMPT) + NUM_BEFORE - 1
        stream.cancel()
    found = [output.token_ids for output in await asyncio.gather(*giver.asking)]
    assert found == [[toy_output(PROMPT, NUM_ALL)], [toy_output(OTHER, NUM_ALL)]]
    await until(giver.is_open)
    await session.close()
    pool = await world.wait_idle()
    assert (pool.num_referenced_blocks, pool.num_hand_offs, pool.num_sessions) == (0, 1, 1)


async def test_a_taker_that_confirms_nothing_is_not_waited_for(giver: Giver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(take_over, "_PATIENCE_S", 0.05)
    async with stub_of(giver.engine) as stub:
        answers = stub.HandOver(request_of_this_model())
        await until(giver.is_closed)  # else the requests may end before the call has come
        giver.gate.is_open.set()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            _ = [answer async for answer in answers]
    assert to_error(failed.value).reason == "TIMED_OUT"
    found = [output.token_ids for output in await asyncio.gather(*giver.asking)]
    assert found == [[toy_output(PROMPT, NUM_ALL)], [toy_output(OTHER, NUM_ALL)]]
    await until(giver.is_open)


async def test_one_hand_over_at_a_time(giver: Giver) -> None:
    async with stub_of(giver.engine) as stub:
        first = stub.HandOver(request_of_this_model())
        await first.read()
        error = await refusal(stub.HandOver(request_of_this_model()).read())
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "HAND_OVER_UNDER_WAY")
        assert error.retry_after is not None
        for address in ("", "x" * 257):
            assert (await refusal(stub.HandOver(request_of_this_model(address)).read())).reason == "INVALID_FIELD"
        first.cancel()
    giver.gate.is_open.set()
    await asyncio.gather(*giver.asking)


async def test_a_request_that_ends_on_its_way_is_not_taken(giver: Giver) -> None:
    async with stub_of(giver.engine) as stub:
        stream = stub.HandOver(request_of_this_model())
        hand_over_id = (await stream.read()).hand_over_id
        giver.gate.is_open.set()
        for _ in range(2):
            await stream.read()
        await stub.CancelRequest(pb.CancelRequestRequest(request_id="first"))
        assert (await giver.asking[0]).reasons == ["cancelled"]
        late = pb.ConfirmHandOverRequest(hand_over_id=hand_over_id, request_id="first", is_taken=True)
        assert (await refusal(stub.ConfirmHandOver(late))).reason == "UNKNOWN_REQUEST"
        await stub.ConfirmHandOver(pb.ConfirmHandOverRequest(hand_over_id=hand_over_id, request_id="second"))
        assert await stream.read() is grpc.aio.EOF
    assert (await giver.asking[1]).token_ids == [toy_output(OTHER, NUM_ALL)], "the taker did not want it"
    await asyncio.wait_for(giver.engine.wait_end(), 20)


async def test_a_cache_service_that_dies_meanwhile_changes_nothing(giver: Giver, world: Services) -> None:
    async with stub_of(giver.engine) as stub:
        stream = stub.HandOver(request_of_this_model())
        await stream.read()
        await world.stop_cache()
        giver.gate.is_open.set()
        handed = [(await stream.read()).request for _ in range(2)]
        assert [one.request.request_id for one in handed] == ["first", "second"]
        stream.cancel()
    await world.start_cache()
    found = [output.token_ids for output in await asyncio.gather(*giver.asking)]
    assert found == [[toy_output(PROMPT, NUM_ALL)], [toy_output(OTHER, NUM_ALL)]]


class FakeGiver(pb_grpc.EngineServiceServicer):
    """Hands over what it is told to, and may die when a request is confirmed."""

    def __init__(self, handed: list[pb.HandedRequest], *, dies: bool = False) -> None:
        self.handed, self.dies = handed, dies
        self.taken: dict[str, bool] = {}
        self.server: grpc.aio.Server = grpc.aio.server()
        pb_grpc.add_EngineServiceServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self._is_over = asyncio.Event()

    async def HandOver(self, request: Any, context: Any) -> AsyncIterator[pb.HandOverResponse]:
        yield pb.HandOverResponse(hand_over_id="x")
        for one in self.handed:
            yield pb.HandOverResponse(request=one)
        while len(self.taken) < len(self.handed):
            await self._is_over.wait()
            self._is_over.clear()

    async def ConfirmHandOver(self, request: Any, context: Any) -> pb.ConfirmHandOverResponse:
        self.taken[request.request_id] = request.is_taken
        if self.dies:
            await self.server.stop(None)
        self._is_over.set()
        return pb.ConfirmHandOverResponse()


def handed_of(request_id: str, token_ids: list[int], **more: Any) -> pb.HandedRequest:
    request = pb.GenerateRequest(
        request_id=request_id,
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(temperature=0, repetition_penalty=1.0, max_tokens=NUM_ALL, seed=1),
    )
    return pb.HandedRequest(request=request, outputs=[pb.HandedOutput(token_ids=token_ids)], **more)


async def test_a_request_goes_on_when_the_giver_is_gone_before_it_answers(world: Services) -> None:
    await world.start_cache()
    giver = FakeGiver([handed_of("mine", toy_output(PROMPT, 5), submission_digest=b"d" * 32)], dies=True)
    address = f"127.0.0.1:{giver.server.add_insecure_port('127.0.0.1:0')}"
    await giver.server.start()
    taker = await world.start_engine(take_over=address)
    client = await world.client(taker)
    found = await client.result("mine", wait_s=20)
    assert (found.state, list(found.outputs[0].token_ids)) == ("completed", toy_output(PROMPT, NUM_ALL))
    assert taker.engine.stats.num_new_tokens == NUM_ALL - 5, "it drew only what was missing"


async def test_a_request_that_cannot_be_is_left_where_it_is(world: Services) -> None:
    await world.start_cache()
    own = toy_output(PROMPT, NUM_ALL)
    two = handed_of("two outputs for one continuation", own[:3])
    two.outputs.add(token_ids=own[:3])
    bad = [
        handed_of("a token outside the vocabulary", [600]),
        handed_of("nothing left of it", own),
        handed_of("tokens behind its end", [*own, 1]),
        two,
    ]
    bad[0].request.sampling.stop_token_ids.append(511)
    uneven = handed_of("log probabilities of some", own[:3])
    uneven.outputs[0].logprobs.add(token_id=own[0])
    best_of = handed_of("best of several with outputs", own[:3])
    best_of.request.best_of = 2
    broken = handed_of("no prompt", own[:3])
    broken.request.ClearField("token_ids")
    giver = FakeGiver([*bad, uneven, best_of, broken, handed_of("good", own[:3])])
    address = f"127.0.0.1:{giver.server.add_insecure_port('127.0.0.1:0')}"
    await giver.server.start()
    taker = await world.start_engine(take_over=address, client_grace=0.0)
    assert [request_id for request_id, is_taken in giver.taken.items() if is_taken] == ["good"]
    assert len(giver.taken) == 8

    async def has_ended() -> bool:
        return not taker.engine.requests.generations

    await until(has_ended)
    assert taker.engine.stats.num_taken_over_requests == 1
    assert (await world.wait_idle()).num_referenced_blocks == 0
    await giver.server.stop(None)


async def test_clients_that_ask_again_lose_nothing_when_the_taker_is_killed_behind_it(giver: Giver, world: Services) -> None:
    for task in giver.asking:
        task.cancel()
    new, flags = f"unix:{world.folder}/new", ("--cache", world.cache.address, "--listen")
    options = GenerateOptions(resubmit_s=20.0, sampling=Sampling(temperature=0, repetition_penalty=1.0, max_tokens=200))
    async with AsyncEngineClient(giver.engine.address) as client:
        stream = client.generate(LONGER, options)
        async with engine_process(*flags, new, "--take-over", giver.engine.address) as taker:
            await logged(taker, "session_opened")
            await until(giver.is_closed)
            giver.gate.is_open.set()
            assert (await logged(taker, "taken_over"))["num_requests"] == 1
            taker.send_signal(signal.SIGKILL)
            await taker.wait()
        async with engine_process(*flags, new) as third:
            await ready(third)
            assert [token async for chunk in stream for token in chunk.token_ids] == toy_output(LONGER, 200)


async def test_an_engine_whose_place_is_taken_exits_with_0(world: Services) -> None:
    await world.start_cache()
    old = f"unix:{world.folder}/old"
    async with engine_process("--cache", world.cache.address, "--listen", old) as giver:
        await ready(giver)
        async with AsyncEngineClient(old) as client:
            assert (await generate(client, PROMPT)).token_ids == [toy_output(PROMPT, 8)]
        taker = await world.start_engine(take_over=old)
        assert await asyncio.wait_for(giver.wait(), 20) == 0
    output = await generate(await world.client(taker), PROMPT * 3)
    assert output.token_ids == [toy_output(PROMPT * 3, 8)]
