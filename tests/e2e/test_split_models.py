"""Models whose cache holds more than heads of K and V, over two ranks and through both services: the tokens of one rank."""

import asyncio
from pathlib import Path

import pytest

from kvkeeper.client import AsyncEngineClient
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model
from tests.support.processes.service_pair import BLOCK_SIZE, Services, generate

pytestmark = pytest.mark.in_turn

PROMPTS = [list(random_tokens(length, seed=length)) for length in (3, 2 * BLOCK_SIZE, 17, 5 * BLOCK_SIZE + 1)]
NUM_NEW = 20
# And so many blocks for each.
KINDS = {"deepseek_v3": 17, "kimi_linear": 65, "ling_3": 65, "qwen3_5_27b": 65, "lfm2_moe": 33, "nemotron_3_nano": 65}


async def outputs_of(client: AsyncEngineClient) -> list[list[list[int]]]:
    """Of all prompts at once, of one with three continuations, and of what goes on behind another one's output."""
    crowd = await asyncio.gather(*(generate(client, prompt, NUM_NEW) for prompt in PROMPTS))
    found = [output.token_ids for output in crowd]
    forked = await generate(client, PROMPTS[2], NUM_NEW, n=3)
    further = await generate(client, [*PROMPTS[2], *forked.token_ids[0], 5], NUM_NEW)
    assert further.usage.cached_tokens > 0
    return [*found, forked.token_ids, further.token_ids]


@pytest.mark.parametrize(("name", "num_blocks"), list(KINDS.items()))
async def test_tokens_are_those_of_one_rank(world: Services, tmp_path: Path, name: str, num_blocks: int) -> None:
    """With so few blocks that sequences are swapped to the host tier."""
    folder = build_model_folder(tmp_path, tiny_model(name))
    options = {"model_folder": folder, "threads": 1, "checkpoint_tokens": 2 * BLOCK_SIZE, "chunk_size": 7, "preemption": "swap"}
    await world.start_cache(num_blocks=num_blocks, num_host_blocks=129, num_pools=2)
    alone = await outputs_of(await world.client(await world.start_engine(**options)))
    engine = await world.start_engine(tensor_parallel=2, **options)
    assert await outputs_of(await world.client(engine)) == alone
    pools = (await (await world.cache_client()).stats()).pools
    (pool,) = [pool for pool in pools if pool.pool.spec.tensor_parallel_size == 2]
    assert pool.num_swap_ins > 0
    assert (pool.num_quarantined_blocks, pool.num_failed_transfers) == (0, 0)
