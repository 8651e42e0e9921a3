"""Requests that are cancelled, abandoned, late, refused or broken: each ends alone, and gives everything back."""

import asyncio

import grpc
import pytest

from kvkeeper.client import AsyncEngineClient, AsyncGeneration, GenerateOptions, Sampling
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc
from kvkeeper.engine_service.rpc.methods import UNIMPLEMENTED_METHODS
from tests.support.models.odd_models import CRASH_TOKEN, GATE_TOKEN, NAN_TOKEN, odd_model
from tests.support.processes.service_pair import Services, generate, toy_output, until
from tests.support.worlds.cache_api import failure

LONG = Sampling(max_tokens=150, temperature=0, repetition_penalty=1.0)


async def begin(client: AsyncEngineClient, **options: object) -> AsyncGeneration:
    """A long request that has given its first token."""
    generation = client.generate([7, 8, 9, 10, 11], GenerateOptions(sampling=LONG, **options))  # type: ignore[arg-type]
    await anext(generation)
    return generation


async def has_tokens(client: AsyncEngineClient) -> bool:
    return (await client.stats()).num_new_tokens > 0


async def is_running(client: AsyncEngineClient) -> bool:
    return (await client.stats()).num_running_requests > 0


async def has_requests(client: AsyncEngineClient, count: int) -> bool:
    return len(await client.list_requests()) == count


async def test_cancel_ends_the_stream_and_gives_the_blocks_back(world: Services) -> None:
    client = await world.serve()
    generation = await begin(client, request_id="mine", n=2)
    assert [row.request_id for row in await client.list_requests()] == ["mine"]
    await client.cancel("mine")
    reasons = [chunk.finish_reason async for chunk in generation if chunk.finish_reason]
    assert reasons == ["cancelled", "cancelled"]
    assert generation.usage is not None
    assert 0 < generation.usage.new_tokens < 300
    pool = await world.wait_idle()
    assert pool.num_referenced_blocks == 0
    stats = await client.stats()
    assert (stats.num_cancelled_requests, stats.num_running_requests) == (1, 0)
    assert (await failure(client.cancel("mine"))).reason == "UNKNOWN_REQUEST"


async def test_a_client_that_goes_away_cancels(world: Services) -> None:
    client = await world.serve()
    generation = await begin(client)
    generation.close()
    assert (await world.wait_idle()).num_referenced_blocks == 0
    assert (await client.stats()).num_cancelled_requests == 1
    assert (await generate(client, [7])).token_ids == [toy_output([7], 8)]


@pytest.mark.parametrize("token", [NAN_TOKEN, CRASH_TOKEN])
async def test_one_request_s_failure_is_its_own(world: Services, token: int) -> None:
    client = await world.serve(odd_model())
    good = asyncio.create_task(generate(client, [1, 2, 3], 60))
    await until(lambda: has_tokens(client))
    if token == CRASH_TOKEN:
        await good  # a batch that raises ends every request in it, so no other request is in it
    failed = await failure(generate(client, [4, 5, 6, 7, 8, token], n=2))
    assert failed.reason == "REQUEST_FAILED"
    assert "bug" not in failed.message
    assert (await good).token_ids == [toy_output([1, 2, 3], 60)]
    assert (await world.wait_idle()).num_referenced_blocks == 0
    assert (await generate(client, [4, 5, 6, 7, 8, 9])).usage.cached_tokens == 0, "nothing of it is shared"


async def test_a_prompt_that_breaks_before_its_end_is_not_shared(world: Services) -> None:
    """Nothing is sampled from its first chunks, but what they compute would be hit by others."""
    client = await world.serve(odd_model(), chunk_size=4)
    prompt = [4, NAN_TOKEN, 6, 7, 8, 9, 10, 11, 12]
    assert (await failure(generate(client, prompt))).reason == "REQUEST_FAILED"
    pool = await world.wait_idle()
    assert (pool.num_indexed_blocks, pool.num_referenced_blocks) == (0, 0)


async def test_what_can_never_fit_is_refused_with_the_limit(world: Services) -> None:
    await world.start_cache(num_blocks=9)  # 32 tokens
    client = await world.client(await world.start_engine())
    refused = await failure(generate(client, [1] * 10, 23))
    error = refused
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NEVER_FITS")
    assert error.metadata == {"requested": "33", "limit": "32"}
    assert (await generate(client, [1] * 10, 22)).token_ids == [toy_output([1] * 10, 22)]


async def test_a_full_queue_refuses_and_says_when_to_come_back(world: Services) -> None:
    client, gate = await world.serve_gated(max_waiting=2)
    crowd = [asyncio.create_task(generate(client, [GATE_TOKEN]))]
    await until(lambda: is_running(client))
    crowd += [asyncio.create_task(generate(client, [1])) for _ in range(2)]
    await until(lambda: has_requests(client, 3))
    full = await failure(generate(client, [1]))
    assert (full.code, full.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert full.metadata == {"limit": "2", "flag": "--max-waiting"}
    assert full.retry_after
    gate.set()
    await asyncio.gather(*crowd)


async def test_one_client_leaves_room_in_the_queue_for_others(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine(max_waiting=10)
    client = await world.client(engine)  # over a Unix socket, where tenants tell clients apart
    crowd = [asyncio.create_task(generate(client, [GATE_TOKEN], tenant="many"))]
    await until(lambda: is_running(client))
    crowd += [asyncio.create_task(generate(client, [1], tenant="many")) for _ in range(9)]
    await until(lambda: has_requests(client, 10))
    full = await failure(generate(client, [1], tenant="many"))
    assert (full.reason, full.metadata) == ("QUEUE_FULL", {"limit": "9", "flag": "--max-waiting"})
    crowd.append(asyncio.create_task(generate(client, [1], tenant="other")))
    await until(lambda: has_requests(client, 11))
    gate.set()
    assert all(output.reasons == ["length"] for output in await asyncio.gather(*crowd))


async def test_two_live_requests_of_one_id(world: Services) -> None:
    client = await world.serve()
    generation = await begin(client, request_id="mine")
    assert (await failure(generate(client, [1], request_id="mine"))).reason == "DUPLICATE_REQUEST"
    generation.close()


async def test_exactly_these_are_not_implemented(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    found = {}
    async with grpc.aio.insecure_channel(engine.address) as channel:
        stub = pb_grpc.EngineServiceStub(channel)
        for method in pb.DESCRIPTOR.services_by_name["EngineService"].methods:
            request = getattr(pb, method.input_type.name)()
            if method.client_streaming:
                request = iter([request])
            try:
                call = getattr(stub, method.name)(request, timeout=5)
                _ = [answer async for answer in call] if method.server_streaming else await call
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    found[method.name] = UNIMPLEMENTED_METHODS.get(method.name)
    assert found == UNIMPLEMENTED_METHODS
    assert found == {}


async def test_lists_page(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine()
    client = await world.client(engine)
    crowd = [asyncio.create_task(generate(client, [GATE_TOKEN], request_id=f"r{place}")) for place in range(5)]
    await until(lambda: has_requests(client, 5))
    ids, token = [], ""
    async with grpc.aio.insecure_channel(engine.address) as channel:
        stub = pb_grpc.EngineServiceStub(channel)
        while True:
            page = await stub.ListRequests(pb.ListRequestsRequest(page_size=2, page_token=token), timeout=5)
            ids += [row.request_id for row in page.requests]
            token = page.next_page_token
            if not token:
                break
            assert len(page.requests) == 2
    assert ids == [row.request_id for row in await client.list_requests()]
    assert sorted(ids) == [f"r{place}" for place in range(5)]
    gate.set()
    await asyncio.gather(*crowd)
