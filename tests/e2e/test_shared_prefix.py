"""Requests that arrive together with one new prefix: it is computed once, on one engine and across two."""

import asyncio

import pytest

from tests.support.processes.service_pair import BLOCK_SIZE, Services, generate, toy_output

PREFIX = [place % 7 + 1 for place in range(16 * BLOCK_SIZE)]


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_a_new_prefix_is_computed_once(world: Services, num_engines: int) -> None:
    await world.start_cache(num_blocks=200)
    clients = [await world.client(await world.start_engine(chunk_size=8, token_budget=64)) for _ in range(num_engines)]
    prompts = [[*PREFIX, 20 + place, 30 + place] for place in range(8)]
    outputs = await asyncio.gather(*(generate(clients[place % num_engines], prompt, 4) for place, prompt in enumerate(prompts)))
    assert [output.token_ids[0] for output in outputs] == [toy_output(prompt, 4) for prompt in prompts]
    computed = sum([(await client.stats()).num_prefill_tokens for client in clients])
    assert computed <= 1.15 * (len(PREFIX) + 2 * len(prompts))
    pool = await world.wait_idle()
    assert pool.num_computing_answers > 0, "at least one start waited"
    assert pool.num_referenced_blocks == 0


async def test_no_request_waits_for_a_cancelled_one(world: Services) -> None:
    client = await world.serve(chunk_size=4, token_budget=8, cache={"num_blocks": 200})
    first = asyncio.create_task(generate(client, [*PREFIX, 1], 4, request_id="first"))
    second = asyncio.create_task(generate(client, [*PREFIX, 2], 4))
    while not (await client.stats()).num_prefill_tokens:
        pass
    await client.cancel("first")
    await first
    assert (await second).token_ids == [toy_output([*PREFIX, 2], 4)]
