"""What happens to requests when the session, the cache service or an engine goes away."""

import asyncio

import grpc
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.client import AsyncCacheSession, AsyncEngineClient, GenerateOptions, KvkeeperError, Sampling
from kvkeeper.client.arena import Arena
from kvkeeper.engine_service.server import StartError
from tests.support.models.odd_models import GATE_TOKEN
from tests.support.processes.service_pair import Services, generate, toy_output, until
from tests.support.worlds.cache_api import ManualClock, failure

PROMPT = list(range(3, 16))
LONG = Sampling(max_tokens=120, temperature=0, repetition_penalty=1.0)


async def begin(client: AsyncEngineClient) -> tuple[list[int], asyncio.Task[list[int]]]:
    """A long request that has given its first token, and the task that reads the rest."""
    generation = client.generate(PROMPT, GenerateOptions(sampling=LONG, n=2))
    first = await anext(generation)

    async def read() -> list[int]:
        tokens: list[list[int]] = [[], []]
        tokens[first.index] += first.token_ids
        async for chunk in generation:
            tokens[chunk.index] += chunk.token_ids
        assert tokens[0] == tokens[1]
        return tokens[0]

    return list(first.token_ids), asyncio.create_task(read())


async def test_requests_outlive_a_session_that_is_lost(world: Services) -> None:
    cache = await world.start_cache()
    engine = await world.start_engine()
    client = await world.client(engine)
    _, rest = await begin(client)
    before = (await client.stats()).cache_session_id
    (session,) = cache.session_manager.sessions
    cache.session_manager.close(session.core.id, session.core.epoch, drained=False)
    assert await rest == toy_output(PROMPT, 120)
    assert (await client.stats()).cache_session_id != before
    pool = await world.wait_idle()
    assert pool.num_quarantined_blocks == 0, "the engine said that it has drained"


async def test_requests_outlive_the_cache_service(world: Services) -> None:
    client = await world.serve()
    _, rest = await begin(client)
    await world.stop_cache()
    await world.start_cache()
    assert await rest == toy_output(PROMPT, 120)
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_without_a_cache_service_requests_end_and_new_ones_are_refused(world: Services) -> None:
    client = await world.serve(reconnect_timeout=0.0)
    _, rest = await begin(client)
    await world.stop_cache()
    ended = await failure(rest)
    for error in (ended, await failure(generate(client, PROMPT))):
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "CACHE_SERVICE_DOWN")
        assert error.retry_after
    assert (await client.stats()).cache_session_id == ""
    await world.start_cache()
    await until(lambda: is_ready(client))
    assert (await generate(client, PROMPT)).token_ids == [toy_output(PROMPT, 8)]


async def is_ready(client: AsyncEngineClient) -> bool:
    return bool((await client.stats()).cache_session_id)


async def test_a_pool_that_came_back_smaller_ends_what_can_not_fit_it(world: Services) -> None:
    client = await world.serve()
    _, rest = await begin(client)
    short = asyncio.create_task(generate(client, [1, 2], 20))
    await world.stop_cache()
    await world.start_cache(num_blocks=12)
    assert (await failure(rest)).reason == "NEVER_FITS"
    assert (await short).token_ids == [toy_output([1, 2], 20)]


async def test_the_lease_is_renewed_while_a_step_takes_long(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    client, gate = await world.serve_gated(lease_ms=500)
    num_renewals = 0
    renew = AsyncCacheSession.renew

    async def counted(session: AsyncCacheSession, completed_step_id: int = 0) -> cache_pb.RenewSessionResponse:
        nonlocal num_renewals
        num_renewals += 1
        if num_renewals == 6:  # longer than the lease
            gate.set()
        return await renew(session, completed_step_id)

    monkeypatch.setattr(AsyncCacheSession, "renew", counted)
    session = (await client.stats()).cache_session_id
    output = await generate(client, [GATE_TOKEN])
    assert num_renewals >= 6
    assert output.token_ids == [toy_output([GATE_TOKEN], 8)]
    assert (await client.stats()).cache_session_id == session


async def test_an_idle_engine_keeps_its_session(world: Services) -> None:
    client = await world.serve(lease_ms=500)
    await generate(client, PROMPT)
    session = (await client.stats()).cache_session_id
    cache = await world.cache_client()

    async def has_outlived_its_lease() -> bool:
        (found,) = (await cache.stats()).sessions
        assert found.session_id == session
        return (await client.stats()).uptime_seconds > 1.5

    await until(has_outlived_its_lease)
    assert (await cache.stats()).num_reaped_sessions == 0


async def test_a_stopping_engine_lets_requests_end(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine(drain_timeout=10.0)
    client = await world.client(engine)
    _, rest = await begin(client)
    draining = asyncio.create_task(engine.drain())
    await until(lambda: is_draining(client))
    await draining
    assert await rest == toy_output(PROMPT, 120)
    await engine.stop()
    assert (await (await world.cache_client()).stats()).sessions == []


async def is_draining(client: AsyncEngineClient) -> bool:
    try:
        await generate(client, [1], 1)
    except KvkeeperError as error:
        return error.reason == "DRAINING"
    return False


async def test_a_stopped_engine_ends_requests_with_a_reason(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_gated_engine(drain_timeout=0.0)
    client = await world.client(engine)
    stuck = asyncio.create_task(generate(client, [GATE_TOKEN]))
    await until(lambda: has_begun(client))
    await engine.drain()
    stopping = asyncio.create_task(engine.stop())
    assert (await failure(stuck)).reason == "DRAINING"
    gate.set()
    await stopping


async def has_begun(client: AsyncEngineClient) -> bool:
    return (await client.stats()).num_running_requests > 0


async def test_a_model_that_the_cache_service_refuses_ends_the_start(world: Services) -> None:
    await world.start_cache(num_pools=1)
    await world.start_engine()
    with pytest.raises(StartError, match="OUT_OF_POOLS"):
        await world.start_engine(block_size=8)


async def test_a_first_session_that_ends_before_the_memory_is_mapped_is_opened_again(
    world: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    cache = await world.start_cache(clock=clock)
    attach, num_attached = AsyncCacheSession.attach, 0

    async def late(session: AsyncCacheSession, *, step_lane: bool) -> Arena:
        nonlocal num_attached
        num_attached += 1
        if num_attached == 1:
            clock.advance(3600)  # as for a process that stood still
            assert cache.session_manager.sessions == []
        return await attach(session, step_lane=step_lane)

    monkeypatch.setattr(AsyncCacheSession, "attach", late)
    client = await world.client(await world.start_engine())
    assert (await generate(client, PROMPT, 5)).token_ids == [toy_output(PROMPT, 5)]
    assert num_attached == 2


async def test_a_client_that_asks_again_gets_the_rest_from_the_next_engine(world: Services) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    sampling = Sampling(max_tokens=120, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, seed=7)
    client = await world.client(engine)
    generation = client.generate(PROMPT, GenerateOptions(sampling=sampling, resubmit_s=20.0))
    tokens = list((await anext(generation)).token_ids)
    await engine.stop()
    num_before = len(tokens)
    await world.start_engine(listen=engine.address)
    tokens += [token async for chunk in generation for token in chunk.token_ids]
    assert num_before < 120
    assert generation.usage is not None
    assert generation.usage.cached_tokens == 12, "the cache was warm"
    async with AsyncEngineClient(engine.address) as other:
        whole = other.generate(PROMPT, GenerateOptions(sampling=sampling))
        assert tokens == [token async for chunk in whole for token in chunk.token_ids]
