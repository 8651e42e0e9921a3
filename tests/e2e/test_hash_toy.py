"""The hash toy through both services: any wrong, stale, torn or shifted block would change its output."""

import asyncio

import pytest

from tests.support.processes.service_pair import BLOCK_SIZE, Services, generate, toy_output

PROMPT = list(range(3, 16))


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE])
async def test_output_is_that_of_the_toy_without_a_cache(world: Services, length: int) -> None:
    client = await world.serve()
    first = await generate(client, PROMPT[:length])
    again = await generate(client, PROMPT[:length])
    cold = await generate(client, PROMPT[:length], skip_look_up=True)
    assert first.token_ids == again.token_ids == cold.token_ids == [toy_output(PROMPT[:length], 8)]
    hits = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert [output.usage.cached_tokens for output in (first, again, cold)] == [0, hits, 0]
    assert again.usage.prompt_tokens == length
    assert again.reasons == ["length"]


@pytest.mark.parametrize("chunk_size", [1, 3, BLOCK_SIZE, 512])
async def test_chunks_of_any_size_give_the_same(world: Services, chunk_size: int) -> None:
    client = await world.serve(chunk_size=chunk_size, token_budget=6)
    prompts = [PROMPT[start:] * 2 for start in range(6)]
    outputs = await asyncio.gather(*(generate(client, prompt) for prompt in prompts))
    assert [output.token_ids[0] for output in outputs] == [toy_output(prompt, 8) for prompt in prompts]
    stats = await client.stats()
    assert stats.num_prefill_tokens + stats.num_cached_tokens == sum(map(len, prompts))


async def test_continuations_share_one_prompt_and_the_copies_of_its_tail(world: Services) -> None:
    client = await world.serve()
    output = await generate(client, PROMPT, n=3)
    assert output.token_ids == [toy_output(PROMPT, 8)] * 3
    assert output.usage.copied_blocks == 2
    assert output.usage.new_tokens == 24
    stats = await client.stats()
    assert stats.num_prefill_tokens == len(PROMPT)
    assert stats.num_copied_blocks == 2
    pool = await world.pool()
    assert (pool.num_forks, pool.num_copies_on_write) == (2, 2)


async def test_a_pool_too_small_for_all_preempts_and_changes_no_token(world: Services) -> None:
    client = await world.serve(cache={"num_blocks": 13})
    prompts = [[place + 1, *PROMPT] for place in range(6)]
    outputs = await asyncio.gather(*(generate(client, prompt, 24, n=1 + place % 2) for place, prompt in enumerate(prompts)))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert all(tokens == toy_output(prompt, 24) for tokens in output.token_ids)
    assert sum(output.usage.num_preemptions for output in outputs) > 0
    assert (await client.stats()).num_preemptions > 0
    assert (await world.pool()).num_evicted_blocks > 0


async def test_a_second_engine_hits_what_the_first_one_computed(world: Services) -> None:
    await world.start_cache()
    first, second = await world.start_engine(), await world.start_engine()
    mine, other = await world.client(first), await world.client(second)
    output = await generate(mine, PROMPT)
    shared = await generate(other, PROMPT)
    assert shared.token_ids == output.token_ids == [toy_output(PROMPT, 8)]
    assert (output.usage.cached_tokens, shared.usage.cached_tokens) == (0, 12)
    assert (await world.pool()).num_evicted_blocks == 0


async def test_two_engines_at_once_on_one_small_pool(world: Services) -> None:
    await world.start_cache(num_blocks=24)
    clients = [await world.client(await world.start_engine()) for _ in range(2)]
    prompts = [[place % 4 + 1, *PROMPT] for place in range(12)]
    outputs = await asyncio.gather(*(generate(clients[place % 2], prompt, 20) for place, prompt in enumerate(prompts)))
    assert [output.token_ids[0] for output in outputs] == [toy_output(prompt, 20) for prompt in prompts]


async def test_slots_of_the_pool_bound_a_crowd(world: Services) -> None:
    client = await world.serve(cache={"max_sequences": 3})
    outputs = await asyncio.gather(*(generate(client, [place + 1], 5, n=1 + place % 3) for place in range(12)))
    for place, output in enumerate(outputs):
        assert all(tokens == toy_output([place + 1], 5) for tokens in output.token_ids)
