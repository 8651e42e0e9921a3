"""Requests with two salts share nothing cached, and those of one salt do, wherever the request goes on.

Hits within a salt stand beside each miss over two.
"""

import asyncio

import pytest

from kvkeeper.client import EngineClient, GenerateOptions, Sampling
from kvkeeper.client import cache as client_cache
from tests.e2e.test_take_over import take_over
from tests.support.processes.service_pair import Services, generate, toy_output
from tests.support.worlds.cache_api import failure

PROMPT = list(range(1, 14))
SHARED = 12  # of its tokens, in full blocks
NUM_NEW = 40


async def cached(world: Services, *salts: str, engine: int = -1) -> list[int]:
    """Cached tokens of the prompt for requests with these salts, one behind the other."""
    client = await world.client(world.engines[engine])
    outputs = [await generate(client, PROMPT, cache_salt=salt) for salt in salts]
    assert all(output.token_ids == [toy_output(PROMPT, 8)] for output in outputs)
    return [output.usage.cached_tokens for output in outputs]


async def test_two_salts_share_nothing_and_one_shares_all(world: Services) -> None:
    await world.serve()
    assert await cached(world, "a", "b", "", "a", "b", "") == [0, 0, 0, SHARED, SHARED, SHARED]


async def test_continuations_and_the_synchronous_client_keep_the_salt(world: Services) -> None:
    client = await world.serve()
    output = await generate(client, PROMPT, n=3, cache_salt="a")
    assert output.token_ids == [toy_output(PROMPT, 8)] * 3

    def ask(salt: str) -> int | None:
        options = GenerateOptions(sampling=Sampling(max_tokens=1), cache_salt=salt)
        with EngineClient(world.engines[0].address) as client, client.generate(PROMPT, options) as generation:
            list(generation)
            return None if generation.usage is None else generation.usage.cached_tokens

    assert [await asyncio.to_thread(ask, salt) for salt in ("b", "a")] == [0, SHARED]


async def test_submitted_requests_have_a_salt(world: Services) -> None:
    client = await world.serve()
    for salt in ("a", "b"):
        await client.submit(PROMPT, GenerateOptions(request_id=salt, sampling=Sampling(max_tokens=1), cache_salt=salt))
        usage = (await client.result(salt, wait_s=10.0)).usage
        assert usage is not None and usage.cached_tokens == 0
    assert await cached(world, "", "a", "b") == [0, SHARED, SHARED]


async def test_a_request_keeps_its_salt_in_the_next_session(world: Services) -> None:
    await world.start_cache()
    engine, gate = await world.start_late_engine(len(PROMPT) + 6)
    asking = asyncio.create_task(generate(await world.client(engine), PROMPT, NUM_NEW, cache_salt="a"))
    await gate.reached()
    await world.stop_cache()
    await world.start_cache()
    gate.is_open.set()
    assert (await asking).token_ids == [toy_output(PROMPT, NUM_NEW)]
    assert await cached(world, "", "b", "a") == [0, 0, SHARED]


@pytest.mark.parametrize("keeps_blocks", [True, False])
async def test_a_request_keeps_its_salt_in_another_engine(
    world: Services, monkeypatch: pytest.MonkeyPatch, keeps_blocks: bool
) -> None:
    await world.start_cache()
    giver, gate = await world.start_late_engine(len(PROMPT) + 6)
    asking = asyncio.create_task(generate(await world.client(giver), PROMPT, NUM_NEW, cache_salt="a"))
    await gate.reached()
    if not keeps_blocks:
        monkeypatch.setattr("kvkeeper.engine_service.movement.take_over.parse_offers", lambda _: {})
    taker = await take_over(world, giver, gate)
    assert (await asking).token_ids == [toy_output(PROMPT, NUM_NEW)]
    assert taker.engine.stats.num_completed_requests == 1
    assert await cached(world, "", "b", "a") == [0, 0, SHARED]


async def test_a_prompt_that_another_engine_computes_keeps_its_salt(world: Services) -> None:
    await world.start_cache()
    helper = await world.start_engine(role="prefill")
    await world.start_engine(role="decode", prefill=helper.address, prefill_min_tokens=1)
    assert await cached(world, "a", "b", "a") == [0, 0, SHARED]
    assert helper.engine.stats.num_prefill_tokens >= 2 * len(PROMPT)


async def test_a_cache_service_of_before_refuses_a_request_with_a_salt_alone(
    world: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would ignore the salt, and share what must not be shared."""
    monkeypatch.setattr(client_cache, "PROTOCOL_VERSION", 1)
    client = await world.serve()
    plain, salted = await asyncio.gather(generate(client, PROMPT), failure(generate(client, PROMPT, cache_salt="a")))
    assert plain.token_ids == [toy_output(PROMPT, 8)]
    assert (salted.reason, "PROTOCOL_VERSION_UNSUPPORTED" in salted.message) == ("REQUEST_FAILED", True)
    assert await cached(world, "") == [SHARED]
