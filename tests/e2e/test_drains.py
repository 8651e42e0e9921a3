"""An engine that is asked to stop: what it has acknowledged ends, and clients get the end before the engine stops."""

import asyncio
from typing import Any

import grpc
import structlog

from kvkeeper.client import AsyncEngineClient, GenerateOptions, KvkeeperError, Sampling
from kvkeeper.client.engine.calls import generate_request
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from kvkeeper.engine_service.server import RunningServer as RunningEngine
from tests.support.models.odd_models import GATE_TOKEN
from tests.support.processes.service_pair import GREEDY, Services, toy_output, until

PROMPT = [1, 2, 3]
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))  # a reader that is behind stops the writer


async def refuses(client: AsyncEngineClient) -> KvkeeperError | None:
    """The error of a request once the engine takes no more."""
    try:
        await client.submit(PROMPT, GenerateOptions(sampling=Sampling(max_tokens=1)))
    except KvkeeperError as error:
        return error
    return None


async def test_submitted_results_are_fetched_before_the_engine_goes(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine(drain_timeout=600.0)
    client = await world.client(engine)
    cancelled = await client.submit([GATE_TOKEN], GenerateOptions(sampling=GREEDY))
    await client.cancel(cancelled)
    gate.set()
    request_id = await client.submit(PROMPT, GenerateOptions(request_id="mine", sampling=GREEDY))
    draining = asyncio.create_task(engine.drain())
    error = await until(lambda: refuses(client))
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert error.retry_after
    await until(lambda: has_ended(engine))
    assert not draining.done(), "no client has asked for the result yet"
    result = await client.result(request_id)
    assert [list(output.token_ids) for output in result.outputs] == [toy_output(PROMPT, len(result.outputs[0].token_ids))]
    await asyncio.wait_for(draining, 60)


def call_unread(channel: grpc.aio.Channel) -> Any:
    """A stream larger than what fits in a buffer on its way."""
    sampling = Sampling(max_tokens=60, temperature=0, repetition_penalty=1.0, num_logprobs=20)
    return pb_grpc.EngineServiceStub(channel).Generate(
        generate_request(PROMPT, GenerateOptions(n=4, sampling=sampling)), timeout=60
    )


async def has_ended(engine: RunningEngine) -> bool:
    """Whether the engine had nothing more to compute, with time to stop since."""
    async with AsyncEngineClient(engine.address) as client:
        before = engine.has_ended_requests
        await client.stats()
    return before


async def has_computed_all(engine: RunningEngine) -> bool:
    return not engine.engine.requests.generations


async def test_a_stream_is_sent_to_its_end_before_the_engine_goes(world: Services) -> None:
    await world.start_cache(num_blocks=256)
    engine = await world.start_engine(drain_timeout=20.0)
    async with grpc.aio.insecure_channel(engine.address, options=SMALL_WINDOW) as channel:
        messages = aiter(call_unread(channel))
        received = [await anext(messages)]
        draining = asyncio.create_task(engine.drain())
        await until(lambda: has_ended(engine))
        assert not draining.done(), "the client has not read its tokens yet"
        received += [message async for message in messages]
        await draining
    for index in range(4):
        tokens = [token for message in received if message.index == index for token in message.token_ids]
        assert tokens == toy_output(PROMPT, 60)
    assert received[-1].usage.new_tokens == 240


async def test_a_client_that_does_not_read_holds_nothing_up(world: Services) -> None:
    await world.start_cache(num_blocks=256)
    engine = await world.start_engine(drain_timeout=0.2)
    async with grpc.aio.insecure_channel(engine.address, options=SMALL_WINDOW) as channel:
        await anext(aiter(call_unread(channel)))
        await until(lambda: has_computed_all(engine))
        with structlog.testing.capture_logs() as logs:
            await engine.drain()
            await engine.stop()
    assert [log["event"] for log in logs if log["log_level"] != "info"] == ["drain_timeout"]
