"""Two engines on one pool that is too small for both: both make progress, and the request that waits longest is first."""

import asyncio

from tests.support.processes.service_pair import BLOCK_SIZE, Services, generate, toy_output


async def test_two_engines_with_requests_that_do_not_fit_together_both_finish_them(world: Services) -> None:
    await world.start_cache(num_blocks=13)
    clients = [await world.client(await world.start_engine()) for _ in range(2)]
    prompts = [[seed, *range(20 + seed, 32 + seed)] for seed in range(8)]
    num_new = 11 * BLOCK_SIZE - 13  # each takes nearly the whole pool in the end
    outputs = await asyncio.gather(
        *(generate(clients[idx % 2], prompt, num_new) for idx, prompt in enumerate(prompts)),
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == [toy_output(prompt, num_new)]
    pool = await world.wait_idle()
    assert pool.num_refused_starts > 0
    assert pool.num_claimed_blocks == 0
