"""Row 17 with a model of floating-point numbers: the demo model's tokens are the same when the cache service is killed.

The same requests, greedy and seeded, run twice through real processes: left alone, and with the cache service killed in the
middle of all of them. Tokens are computed again in other batches then, which rounds differently, so either of two tokens may
come where they are as good as alike (near_ties.py). Any other token that differs is a violation.
"""

import asyncio
import random

from kvkeeper.client import AsyncEngineClient, CallOptions, GenerateOptions, Sampling
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.soak.compared_streams import Asked, Crowd, outputs
from tests.soak.row import Counts
from tests.support.processes.fleet import DEADLINE_S, fleet

_STEMS = ("The cache service keeps", "A block of memory", "When the engine", "Once upon a time", "In the morning the")
_WORDS = ("and", "the", "of", "two", "old", "long", "every", "never")
_NUM_REQUESTS = 8


async def run(seed: int, num_tokens: int, num_kills: int) -> Counts:
    """Counts tokens compared; faults are requests under way in a kill. Worst: the largest gap at a token that differs."""
    rng = random.Random(seed)
    cache = {"num_blocks": 256, "drain_timeout": 0.0}
    async with fleet(1, cache, model=str(DEMO_MODEL_DIR), block_size=16, token_budget=256) as services:
        async with AsyncEngineClient(services.engine_addresses[0], CallOptions(timeout_s=DEADLINE_S, retry_s=0)) as client:
            asked = [await _request(client, rng, num_tokens, is_greedy=place % 2 == 1) for place in range(_NUM_REQUESTS)]
            alone = await asyncio.gather(*(outputs(client, request) for request in asked))
            assert all(len(output.token_ids) == len(output.gaps) == num_tokens for (output,) in alone)
            crowd = Crowd(client, asked, alone)
            crowd.is_over = True  # after one time
            running = asyncio.create_task(crowd.again_and_again())
            total, num_hit = _NUM_REQUESTS * num_tokens, 0
            for kill in range(num_kills):
                first = total * kill // num_kills
                wanted = max(_NUM_REQUESTS, rng.randint(first, first + total // num_kills // 2))
                await crowd.until_tokens(wanted - crowd.num_tokens)
                num_hit += crowd.num_under_way
                await services.cache.kill()
                await services.start_cache()
            await asyncio.wait_for(running, DEADLINE_S)
    return Counts(total, num_hit, crowd.largest_gap)


async def _request(client: AsyncEngineClient, rng: random.Random, num_tokens: int, *, is_greedy: bool) -> Asked:
    """Some words to go on from."""
    prompt = await client.tokenize(" ".join([rng.choice(_STEMS), *rng.choices(_WORDS, k=rng.randint(0, 20))]))
    temperature, seed = 0.0 if is_greedy else 0.8, rng.getrandbits(32)
    sampling = Sampling(max_tokens=num_tokens, temperature=temperature, seed=seed, ignore_eos=True, num_logprobs=2)
    timeout_ms = int(3000 * DEADLINE_S)
    return Asked(tuple(prompt), GenerateOptions(timeout_ms=timeout_ms, skip_look_up=True, sampling=sampling))
