"""Many requests over one call: each is as if it were alone, whatever becomes of the others and of the call."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvkeeper.client import AsyncEngineClient, CallOptions, GenerateOptions, KvkeeperError, Sampling, transport
from kvkeeper.client.engine import many
from kvkeeper.client.errors import parse_error, to_error
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from kvkeeper.engine_service.server import RunningServer
from kvkeeper.engine_service.serving import stream_buffer
from kvkeeper.engine_service.serving.front import Front
from kvkeeper.engine_service.serving.front_process import FrontTask
from tests.support.models.odd_models import GATE_TOKEN
from tests.support.processes.service_pair import DEADLINE_S, Services, generate, toy_output, until
from tests.support.worlds.cache_api import failure, refusal

NUM_TOKENS = 12
NUM_COLUMNS = 60
LONG = Sampling(max_tokens=150, temperature=0, repetition_penalty=1.0)


def numbered(number: int, prompt: list[int], max_tokens: int = NUM_TOKENS, **fields: Any) -> pb.NumberedRequest:
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0, repetition_penalty=1)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling, **fields)
    return pb.NumberedRequest(number=number, request=request)


@asynccontextmanager
async def many_call(engine: RunningServer, channel_options: Any = ()) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(engine.address, options=channel_options) as channel:
        yield pb_grpc.EngineServiceStub(channel).GenerateMany(timeout=DEADLINE_S)


async def begin(call: Any, *requests: pb.NumberedRequest) -> None:
    await call.write(pb.GenerateManyRequest(begin=requests))


async def rest(call: Any) -> tuple[dict[int, list[int]], dict[int, str], dict[int, list[str]]]:
    """What comes until the call ends: tokens, reasons of errors and ids by number."""
    tokens, errors, ids = defaultdict(list), {}, defaultdict(list)
    async for message in call:
        for one in message.responses:
            assert one.number not in errors, "an error is the last"
            if one.HasField("error"):
                errors[one.number] = parse_error(one.error).reason
            else:
                tokens[one.number] += one.response.token_ids
                ids[one.number].append(one.response.request_id)
    return dict(tokens), errors, dict(ids)


async def ended(call: Any) -> KvkeeperError:
    """The error that ends the call."""
    return await refusal(rest(call))


def front_of(engine: RunningServer) -> Front:
    """The one in this process."""
    (handle,) = engine._fronts._fronts
    assert isinstance(handle.runner, FrontTask)
    return handle.runner._front


async def is_running(engine: RunningServer, count: int) -> bool:
    return len(engine.engine.requests.generations) == count


async def test_requests_of_one_call_end_each_for_itself(world: Services) -> None:
    await world.start_cache(num_blocks=256)
    engine = await world.start_engine()
    async with many_call(engine) as call:
        prompts = {number: [1, 2, 3 + number] for number in range(1, 9)}
        await begin(call, *(numbered(number, prompt, request_id=f"r{number}") for number, prompt in prompts.items()))
        await begin(call, numbered(100, [1 << 30]), numbered(101, [1], request_id="r1", max_tokens=0), numbered(102, []))
        await call.done_writing()
        tokens, errors, ids = await rest(call)
    assert tokens == {number: toy_output(prompt, NUM_TOKENS) for number, prompt in prompts.items()}
    assert errors == {100: "WRONG_TOKEN_ID", 101: "INVALID_FIELD", 102: "INVALID_FIELD"}
    assert all(found[0] == f"r{number}" and not any(found[1:]) for number, found in ids.items())
    assert (await world.wait_idle()).num_referenced_blocks == 0
    assert engine.service.num_streams == 0


@pytest.mark.parametrize("reads_parts", [True, False])
@pytest.mark.parametrize("pace", [{}, {"stream_interval_ms": 0.0}], ids=["default", "each"])
async def test_what_is_tokens_alone_comes_as_columns_to_a_client_that_reads_them(
    world: Services, reads_parts: bool, pace: dict[str, float]
) -> None:
    await world.start_cache(num_blocks=256)
    engine = await world.start_engine(**pace)
    prompts = {number: [1, 2, 3 + number] for number in range(1, 9)}
    tokens: dict[int, list[int]] = defaultdict(list)
    has_ended, num_parts = set(), 0
    async with many_call(engine) as call:
        # So many that they do not all come while the first of them are written.
        requests = [numbered(number, prompt, NUM_COLUMNS) for number, prompt in prompts.items()]
        await call.write(pb.GenerateManyRequest(begin=requests, reads_parts=reads_parts))
        more = numbered(9, [1, 2, 12], NUM_COLUMNS), numbered(10, [1, 2, 13], NUM_COLUMNS)
        more[0].request.sampling.num_logprobs, more[1].request.n = 0, 2
        await begin(call, *more)
        await call.done_writing()
        async for message in call:
            token_ids = list(message.parts.token_ids)
            for number, count in zip(message.parts.numbers, message.parts.num_tokens, strict=True):
                assert number in tokens, "the first tells the id"
                assert number in prompts, "it brings more than tokens"
                tokens[number] += token_ids[:count]
                num_parts, token_ids = num_parts + 1, token_ids[count:]
            assert not token_ids
            for one in message.responses:
                assert one.number not in has_ended
                assert one.number not in message.parts.numbers
                tokens[one.number] += one.response.token_ids if one.response.index == 0 else []
                has_ended |= {one.number} if one.response.HasField("usage") else set()
    expected = {**prompts, 9: [1, 2, 12], 10: [1, 2, 13]}
    assert tokens == {number: toy_output(prompt, NUM_COLUMNS) for number, prompt in expected.items()}
    assert has_ended == expected.keys()
    assert (num_parts > 0) == reads_parts


async def test_a_request_that_is_cancelled_tells_nothing_more(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine()
    async with many_call(engine) as call:
        await begin(call, numbered(1, [GATE_TOKEN]), numbered(2, [1, 2]), numbered(3, [GATE_TOKEN, 1]))
        await until(lambda: is_running(engine, 3))
        await call.write(pb.GenerateManyRequest(cancel=[1, 3, 77]))
        await until(lambda: is_running(engine, 1))
        gate.set()
        await begin(call, numbered(1, [1, 5]))
        await call.done_writing()
        tokens, errors, _ = await rest(call)
    assert (tokens, errors) == ({1: toy_output([1, 5], NUM_TOKENS), 2: toy_output([1, 2], NUM_TOKENS)}, {})
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_requests_end_with_their_call(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine()
    async with many_call(engine) as call:
        await begin(call, numbered(1, [GATE_TOKEN]), numbered(2, [GATE_TOKEN, 1]))
        await until(lambda: is_running(engine, 2))
        call.cancel()
        await until(lambda: is_running(engine, 0))
    gate.set()
    assert (await world.wait_idle()).num_referenced_blocks == 0
    assert engine.service.num_streams == 0


@pytest.mark.parametrize(
    "raw", [b"\xff\xff", pb.GenerateManyRequest(begin=[numbered(1, [1, 2])]).SerializeToString()], ids=["nonsense", "number"]
)
async def test_a_message_that_nothing_can_be_made_of_ends_the_call(world: Services, raw: bytes) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine()
    async with grpc.aio.insecure_channel(engine.address) as channel:
        call = channel.stream_stream("/kvkeeper.engine.v1.EngineService/GenerateMany")(timeout=DEADLINE_S)
        await call.write(pb.GenerateManyRequest(begin=[numbered(1, [GATE_TOKEN])]).SerializeToString())
        await until(lambda: is_running(engine, 1))
        await call.write(raw)
        with pytest.raises(grpc.RpcError) as failed:
            assert [answer async for answer in call] == []
        assert to_error(failed.value).reason == "INVALID_FIELD"
        await until(lambda: is_running(engine, 0))
    gate.set()


async def test_a_process_that_does_not_read_loses_what_it_does_not_read(
    world: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_buffer, "MAX_UNREAD", 4000)
    await world.start_cache(num_blocks=1024)
    engine = await world.start_engine(fronts=0)  # whose limit is changed
    client = await world.client(engine)
    much = numbered(1, [7, 8, 9], 300, n=4)
    much.request.sampling.num_logprobs = 20
    async with many_call(engine, [("grpc.http2.bdp_probe", 0)]) as call:
        await begin(call, much)
        await until(lambda: is_running(engine, 1))
        await until(lambda: is_running(engine, 0))
        assert (await generate(client, [1, 2])).token_ids == [toy_output([1, 2], 8)]
        assert (await world.wait_idle()).num_referenced_blocks == 0, "while it still does not read"
        await call.done_writing()
        tokens, errors, _ = await rest(call)
    assert errors == {1: "NOT_READ"}
    assert len(tokens[1]) < 4 * 300


async def test_calls_beyond_the_limit_are_refused_and_requests_sent_in_calls_of_their_own(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine(many_calls=1)
    async with many_call(engine) as first:
        await begin(first, numbered(1, [GATE_TOKEN]))
        await until(lambda: is_running(engine, 1))
        async with many_call(engine) as second:
            refused = await ended(second)
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert refused.metadata == {"limit": "1", "flag": "--many-calls"}
        client = await world.client(engine)
        gate.set()
        found = await asyncio.gather(*(generate(client, [1, number], NUM_TOKENS) for number in range(5)))
        assert [one.token_ids[0] for one in found] == [toy_output([1, number], NUM_TOKENS) for number in range(5)]
        await first.done_writing()
        assert set((await rest(first))[0]) == {1}


async def test_a_refusal_that_comes_while_the_first_message_is_written_is_one_too(world: Services) -> None:
    client = await world.serve()
    streams = many.ManyStreams(client._transport)
    lost = "Internal error from Core"  # what gRPC says in place of the refusal
    own = streams.own_call(KvkeeperError(grpc.StatusCode.UNAVAILABLE, message=lost), numbered(1, [1, 2], 4).request, None)
    assert own is not None
    assert [token for message in [one async for one in own] for token in message.token_ids] == toy_output([1, 2], 4)
    cut = KvkeeperError(grpc.StatusCode.UNAVAILABLE, message="the engine ended the call")
    assert streams.own_call(cut, numbered(1, [1]).request, None) is None


async def test_a_client_sends_its_requests_over_one_call_and_ends_it_when_it_has_none(
    world: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "_IDLE_S", 0.0)
    await world.start_cache(num_blocks=256)
    engine = await world.start_engine(fronts=0)  # whose calls are counted here
    client = await world.client(engine)
    peers = front_of(engine)._streams._many_calls._num_of

    async def has_calls(count: int) -> bool:
        return peers.total() == count

    running = [asyncio.create_task(generate(client, [1, number], 30)) for number in range(9)]
    await until(lambda: has_calls(1))
    assert [(await one).token_ids for one in running] == [[toy_output([1, number], 30)] for number in range(9)]
    await until(lambda: has_calls(0))
    assert (await generate(client, [1, 2])).token_ids == [toy_output([1, 2], 8)], "over another call"


async def test_an_engine_that_has_no_such_call_gets_calls_of_their_own(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    own = transport.AsyncTransport(engine.address, CallOptions(), pb_grpc.EngineServiceStub)
    world.defer(own.close)
    own.stub.GenerateMany = own.channel.stream_stream("/kvkeeper.engine.v1.EngineService/NotYetThere")
    async with AsyncEngineClient(engine.address) as client:
        client._transport = own
        for number in range(3):
            assert (await generate(client, [1, number])).token_ids == [toy_output([1, number], 8)]
        assert client._many[own]._is_unknown, "asked once"


async def test_a_stream_that_is_not_read_delays_no_other(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "_MOST_UNREAD", 60)
    client = await world.serve(cache={"num_blocks": 256})
    stuck = client.generate([7, 8], GenerateOptions(sampling=LONG))
    await anext(stuck)
    assert (await generate(client, [1, 2], 50)).token_ids == [toy_output([1, 2], 50)]
    assert (await world.wait_idle()).num_referenced_blocks == 0
    with pytest.raises(KvkeeperError) as failed:
        _ = [chunk async for chunk in stuck]
    assert (failed.value.reason, failed.value.metadata) == ("NOT_READ", {"limit": "60"})


async def test_a_stream_has_its_own_deadline(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine()
    client = await world.client(engine)
    late = client._transport.stream(
        many.ManyStreams(client._transport).method, numbered(1, [GATE_TOKEN]).request, CallOptions(timeout_s=0.3, retry_s=0)
    )
    failed = await failure(anext(late))
    assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: is_running(engine, 0))
    gate.set()
