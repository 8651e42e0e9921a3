"""A crowd of random requests on small pools: every token right, every request ended, everything given back."""

import asyncio
import contextlib
import random

import pytest

from kvkeeper.client import AsyncEngineClient, GenerateOptions, KvkeeperError, Sampling
from tests.support.processes.service_pair import DEADLINE_S, Services, generate, toy_output

NUM_REQUESTS = 60


async def one(client: AsyncEngineClient, seed: int) -> str:
    """A request that ends by itself, is cancelled, or is abandoned. How it ended."""
    rng = random.Random(seed)
    prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
    num_new, n = rng.randrange(1, 20), rng.choice([1, 1, 1, 2, 4])
    leave_after = rng.choice([None, None, None, 0, 3])
    sampling = Sampling(max_tokens=num_new, temperature=0, repetition_penalty=1.0)
    options = GenerateOptions(n=n, priority=rng.randrange(3), request_id=str(seed), sampling=sampling)
    generation = client.generate(prompt, options)
    tokens: list[list[int]] = [[] for _ in range(n)]
    num_chunks = 0
    async for chunk in generation:
        tokens[chunk.index] += chunk.token_ids
        num_chunks += 1
        if num_chunks == leave_after:
            generation.close()
            return "left"
        if leave_after == 0 and num_chunks == 2:
            with contextlib.suppress(KvkeeperError):  # it may have ended meanwhile
                await client.cancel(str(seed))
    expected = toy_output(prompt, num_new)
    for found in tokens:
        assert found == expected[: len(found)]
    assert leave_after == 0 or all(len(found) == num_new for found in tokens)
    return "ended"


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 17, "max_sequences": 256},
        {"num_blocks": 40, "max_sequences": 5},
        {"num_blocks": 24, "max_sequences": 8},
    ],
    ids=["few blocks", "few slots", "few of both"],
)
@pytest.mark.parametrize("num_engines", [1, 2])
async def test_a_crowd(world: Services, options: dict[str, int], num_engines: int) -> None:
    await world.start_cache(**options)
    engines = [await world.start_engine(chunk_size=5, token_budget=24, max_sequences=8) for _ in range(num_engines)]
    clients = [await world.client(engine) for engine in engines]
    async with asyncio.timeout(2 * DEADLINE_S):
        ends = await asyncio.gather(*(one(clients[seed % num_engines], seed) for seed in range(NUM_REQUESTS)))
    assert set(ends) == {"ended", "left"}
    # A request alone: its forks find slots and blocks, while in a crowd with few of both none may.
    assert (await generate(clients[0], [0, 1, 2, 0, 1], 4, n=2)).token_ids == [toy_output([0, 1, 2, 0, 1], 4)] * 2
    pool = await world.wait_idle()
    assert pool.num_referenced_blocks == 0
    assert pool.num_free_blocks + pool.num_cached_blocks == options["num_blocks"] - 1
    assert pool.num_hits > 0
    assert pool.num_copies_on_write > 0
    for engine in engines:
        assert not engine.engine.requests.generations
        assert engine.engine.scheduler.is_empty
