"""A model with latent attention through both services: its blocks are opaque pages, and all that moves blocks works on them."""

import asyncio
from pathlib import Path

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.client import KvkeeperError, Retention
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.loader import load_model
from tests.support.models.tiny_models import NumericsCase, build_model_folder, random_tokens, tiny_model
from tests.support.processes.service_pair import BLOCK_SIZE, Output, Services, generate
from tests.unit.engine_service.model.test_numerics import HandTables

PROMPTS = [[place + 3, *random_tokens(2 * BLOCK_SIZE, seed=1)] for place in range(6)]
NUM_NEW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"), tiny_model("deepseek_v3"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Greedy tokens after each prompt, of the model on tables made by hand."""
    model, _ = load_model(folder, progress=False)
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_NEW):
            (logits,) = HandTables(model, BLOCK_SIZE).compute([NumericsCase(tuple(tokens))], 64)
            tokens.append(int(logits[-1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


async def crowd(world: Services, folder: Path, **options: object) -> list[Output]:
    model = load_served_model(EngineConfig(model=str(folder), progress=False))
    client = await world.client(await world.start_engine(model, **options))
    return list(await asyncio.gather(*(generate(client, prompt, NUM_NEW) for prompt in PROMPTS)))


@pytest.mark.parametrize(
    "options",
    [{"preemption": "swap"}, {"preemption": "recompute"}, {"speculation": "prompt-look-up"}, {"chunk_size": 4}],
    ids=lambda options: "-".join(map(str, *options.items())),
)
async def test_tokens_are_the_same_under_pressure(
    world: Services, folder: Path, expected: list[list[int]], options: dict[str, object]
) -> None:
    await world.start_cache(num_blocks=17, num_host_blocks=129)
    outputs = await crowd(world, folder, **options)
    assert [output.token_ids for output in outputs] == [[tokens] for tokens in expected]
    assert sum(output.usage.num_preemptions for output in outputs) > 0
    pool = await world.wait_idle()
    assert pool.num_failed_transfers == 0
    assert options.get("preemption") != "swap" or pool.num_swap_ins > 0


async def test_a_block_is_a_page_of_latents_and_reading_k_and_v_is_refused(world: Services, folder: Path) -> None:
    await world.start_cache(num_blocks=64)
    outputs = await crowd(world, folder)
    hit = await generate(await world.client(world.engines[0]), PROMPTS[0], 1)
    assert hit.usage.cached_tokens >= BLOCK_SIZE
    assert len(outputs) == len(PROMPTS)
    info = (await world.pool()).pool
    layout = load_served_model(EngineConfig(model=str(folder), progress=False)).layout(BLOCK_SIZE)
    width = 24 + 8  # latent and rotated key
    assert info.block_bytes == info.spec.page.page_bytes == layout.block_bytes == 2 * BLOCK_SIZE * width * 4
    assert info.spec.layout == cache_pb.KV_LAYOUT_OPAQUE
    async with await world.cache_client() as client:
        session = await client.open_session(info.spec, cache_pb.EXECUTOR_CACHE)
        await session.create_sequence(1, PROMPTS[0], 64)
        with pytest.raises(KvkeeperError, match="OPAQUE_PAGES"):
            await session.read_kv(1, 0, 1)
        await session.close()


async def test_retention_is_refused(world: Services, folder: Path) -> None:
    client = await world.serve(load_served_model(EngineConfig(model=str(folder), progress=False)), cache={"num_blocks": 64})
    with pytest.raises(KvkeeperError, match="a model whose cache holds latents"):
        await generate(client, PROMPTS[0], retention=Retention(4, 16))
