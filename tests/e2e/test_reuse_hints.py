"""What a client knows of reuse reaches the cache service's eviction order, by way of the engine."""

import pytest

from tests.support.processes.service_pair import BLOCK_SIZE, Services, generate

NONE_LEN, SOON_LEN, PLAIN_LEN = 2, 3, 4  # blocks


def prompt(first: int, num_blocks: int) -> list[int]:
    return [first + place % 3 for place in range(num_blocks * BLOCK_SIZE)]


async def test_hints_of_requests_order_what_is_evicted(world: Services) -> None:
    client = await world.serve(cache={"num_blocks": 100})
    await generate(client, prompt(1, NONE_LEN), 2, reuse_hint="none")
    await generate(client, prompt(10, SOON_LEN), 2, reuse_hint="soon")
    await generate(client, prompt(20, PLAIN_LEN), 2)
    pool = await world.wait_idle()
    assert (pool.num_no_reuse_blocks, pool.num_soon_blocks) == (NONE_LEN, SOON_LEN)
    assert pool.num_cached_blocks - pool.num_partial_nodes == NONE_LEN + SOON_LEN + PLAIN_LEN


async def test_a_request_whose_next_turn_is_awaited_for_a_time_is_retained(world: Services) -> None:
    client = await world.serve(cache={"num_blocks": 100})
    await generate(client, prompt(10, SOON_LEN), 2, retain_ms=600_000)
    pool = await world.wait_idle()
    assert pool.num_soon_blocks == pool.num_cached_blocks - pool.num_partial_nodes == SOON_LEN


async def test_all_continuations_of_a_request_say_the_same(world: Services) -> None:
    client = await world.serve(cache={"num_blocks": 100})
    await generate(client, prompt(1, 2), 2 * BLOCK_SIZE, n=3, reuse_hint="none")
    pool = await world.wait_idle()
    assert 2 < pool.num_no_reuse_blocks == pool.num_cached_blocks - pool.num_partial_nodes


async def test_a_hint_that_means_nothing_is_refused_before_it_is_sent(world: Services) -> None:
    client = await world.serve(cache={"num_blocks": 100})
    with pytest.raises(ValueError, match="reuse_hint is none or soon, not 'later'"):
        await generate(client, [1], 2, reuse_hint="later")
