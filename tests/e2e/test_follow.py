"""Streams of submitted requests: begun late, broken and gone on with, by several clients, without a token missed or doubled."""

import asyncio

import grpc
import pytest

from kvkeeper.client import (
    AsyncEngineClient,
    AsyncGeneration,
    CallOptions,
    EngineClient,
    GenerateOptions,
    OutputChunk,
    Sampling,
)
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.models.odd_models import GATE_TOKEN, NAN_TOKEN, odd_model
from tests.support.processes.cut_proxy import cutting
from tests.support.processes.service_pair import Services, generate, toy_output, until
from tests.support.worlds.cache_api import failure

PROMPT = [1, 2, 3]
NUM_BEFORE, NUM_ALL = 6, 40
NO_PATIENCE = CallOptions(retry_s=0)


def options(request_id: str = "", max_tokens: int = NUM_ALL, **more: object) -> GenerateOptions:
    sampling = Sampling(temperature=0, repetition_penalty=1.0, max_tokens=max_tokens)
    return GenerateOptions(request_id=request_id, sampling=sampling, **more)  # type: ignore[arg-type]


def ids_of(chunks: list[OutputChunk], index: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


async def test_a_stream_goes_on_behind_a_broken_connection(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_late_engine(len(PROMPT) + NUM_BEFORE, listen="127.0.0.1:0")
    async with cutting(engine.address) as proxy, AsyncEngineClient(proxy.address, NO_PATIENCE) as client:
        generation = client.follow(await client.submit(PROMPT, options(n=2)))
        chunks: list[OutputChunk] = []
        while len(ids_of(chunks, 0)) < NUM_BEFORE or not ids_of(chunks, 1):  # the second is a fork, a step behind
            chunks.append(await anext(generation))
        proxy.cut()
        gate.is_open.set()
        chunks += [chunk async for chunk in generation]
    for index in (0, 1):
        assert ids_of(chunks, index) == toy_output(PROMPT, NUM_ALL)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"] * 2
    assert generation.usage is not None
    assert generation.usage.new_tokens == 2 * NUM_ALL


async def test_the_client_for_threads_goes_on_as_well(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_late_engine(len(PROMPT) + NUM_BEFORE, listen="127.0.0.1:0")
    loop = asyncio.get_running_loop()
    async with cutting(engine.address) as proxy:

        def follow() -> list[OutputChunk]:
            with EngineClient(proxy.address, NO_PATIENCE) as client:
                generation = client.follow(client.submit(PROMPT, options()))
                chunks: list[OutputChunk] = []
                while len(ids_of(chunks)) < NUM_BEFORE:
                    chunks.append(next(generation))
                loop.call_soon_threadsafe(proxy.cut)
                gate.is_open.set()
                return chunks + list(generation)

        chunks = await asyncio.to_thread(follow)
    assert ids_of(chunks) == toy_output(PROMPT, NUM_ALL)


async def test_text_and_log_probabilities_go_on_at_the_token_that_is_next(world: Services) -> None:
    """Each place at which a stream of the real tokenizer may break: text is held back behind tokens."""
    await world.start_cache()
    model = load_served_model(EngineConfig(model=str(DEMO_MODEL_DIR), progress=False))
    engine = await world.start_engine(model, block_size=16)
    client = await world.client(engine)
    prompt = "naïve = 'é…"
    sampling = Sampling(temperature=1.5, seed=5, max_tokens=24, num_logprobs=1, num_prompt_logprobs=0, stop=("\n\n\n",))
    request_id = await client.submit(prompt, GenerateOptions(sampling=sampling))
    whole = (await client.result(request_id, wait_s=20)).outputs[0]
    undisturbed = client.generate(prompt, GenerateOptions(sampling=sampling))
    steps = [chunk async for chunk in undisturbed]
    assert ids_of(steps) == list(whole.token_ids)
    async with grpc.aio.insecure_channel(engine.address) as channel:
        stub = pb_grpc.EngineServiceStub(channel)
        texts: list[str] = []
        for num_tokens in range(len(whole.token_ids) + 1):
            received = [pb.ReceivedOutput(index=0, num_tokens=num_tokens)]
            answers = [
                one async for one in stub.StreamRequest(pb.StreamRequestRequest(request_id=request_id, received=received))
            ]
            assert [token for one in answers for token in one.token_ids] == list(whole.token_ids[num_tokens:])
            assert [one.token_id for answer in answers for one in answer.logprobs] == list(whole.token_ids[num_tokens:])
            assert bool(answers[0].prompt_logprobs) == (num_tokens == 0)
            rest = "".join(one.text for one in answers)
            assert whole.text.endswith(rest)
            texts.append(whole.text.removesuffix(rest) if rest else whole.text)
            assert answers[-1].HasField("usage")
    assert texts[0] == ""
    num_tokens, text = 0, ""
    for chunk in steps[:-1]:
        num_tokens, text = num_tokens + len(chunk.token_ids), text + chunk.text
        assert texts[num_tokens] == text, "a stream that broke here goes on with the text of the next message"
    assert len(set(texts)) > 5


async def test_several_clients_follow_and_none_of_them_ends_the_request(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine()
    client = await world.client(engine)
    await client.submit([GATE_TOKEN, 1], options("mine", 8))
    first: AsyncGeneration = client.follow("mine")
    second = client.follow("mine")

    async def are_there() -> bool:
        return engine.service.num_streams == 2

    await until(are_there)
    first.close()

    async def is_one_left() -> bool:
        return engine.service.num_streams == 1

    await until(is_one_left)
    gate.set()
    expected = toy_output([GATE_TOKEN, 1], 8)
    assert ids_of([chunk async for chunk in second]) == expected
    assert ids_of([chunk async for chunk in client.follow("mine")]) == expected, "also after its end"


async def test_failures_are_told_behind_what_came_before(world: Services) -> None:
    client = await world.serve(odd_model())
    await client.submit([NAN_TOKEN], options("bad"))
    assert (await failure(anext(client.follow("bad")))).reason == "REQUEST_FAILED"
    assert (await failure(anext(client.follow("nothing")))).reason == "UNKNOWN_REQUEST"
    output = await generate(client, PROMPT, request_id="a stream")
    assert output.token_ids == [toy_output(PROMPT, 8)]
    ended = await failure(anext(client.follow("a stream")))
    assert ended.reason == "UNKNOWN_REQUEST", "a request of Generate is known to its own stream alone"


async def test_what_a_client_cannot_have_is_refused(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    client = await world.client(engine)
    await client.submit(PROMPT, options("mine", 4))
    await client.result("mine", wait_s=20)
    bad = {
        "received": [pb.ReceivedOutput(index=place) for place in range(65)],
        "received[0].index": [pb.ReceivedOutput(index=64)],
        "received[1].index": [pb.ReceivedOutput(), pb.ReceivedOutput()],
        "received[0].num_tokens": [pb.ReceivedOutput(num_tokens=5)],
        "received[0].has_ended": [pb.ReceivedOutput(num_tokens=3, has_ended=True)],
    }
    async with grpc.aio.insecure_channel(engine.address) as channel:
        stub = pb_grpc.EngineServiceStub(channel)
        for field, received in bad.items():
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.StreamRequest(pb.StreamRequestRequest(request_id="mine", received=received)).read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field in (refused.value.details() or "")
    assert engine.service.num_streams == 0
