"""Models with windows in some layers: the same tokens with groups of layers as without, for fewer blocks."""

import asyncio
from pathlib import Path

import pytest

from kvkeeper.client import Sampling
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import EngineConfig
from tests.support.models.tiny_models import TinyModel, build_model_folder, random_tokens
from tests.support.processes.service_pair import GREEDY, Output, Services, generate, services

WINDOW = 8
HYBRID = TinyModel(
    "hybrid", "Gemma3Text", {"sliding_window": WINDOW, "sliding_window_pattern": 3, "num_hidden_layers": 6, "vocab_size": 512}
)
PROMPTS = [random_tokens(length, seed=length) for length in (3, 17, 40, 61)]
SAMPLED = Sampling(temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"), HYBRID)


def model_of(folder: Path, *, groups: bool) -> ServedModel:
    return load_served_model(EngineConfig(model=str(folder), progress=False, groups=groups))


async def outputs(world: Services, folder: Path, *, groups: bool, num_blocks: int, **options: object) -> list[Output]:
    """Of all prompts, twice and at once: alone, sampled, with continuations, and as beams."""
    model = model_of(folder, groups=groups)
    assert bool(model.groups) == groups
    await world.start_cache(num_blocks=num_blocks)
    engine = await world.start_engine(model, **options)
    client = await world.client(engine)
    found = [await generate(client, prompt, 24) for prompt in PROMPTS]
    found += [await generate(client, [*PROMPTS[3], *found[3].token_ids[0][:9], 5], 12)]
    found += [await generate(client, prompt, 24, SAMPLED, n=3) for prompt in PROMPTS[1:]]
    found += await asyncio.gather(*(generate(client, [*prompt, 9], 30) for prompt in PROMPTS * 2))
    pool = await world.wait_idle()
    assert len(pool.pool.spec.groups) == (3 if groups else 0)
    return found


@pytest.mark.parametrize(
    ("num_blocks", "options"),
    [
        (400, {}),
        (120, {"chunk_size": 16}),
        (400, {"speculation": "prompt-look-up"}),
        (90, {"chunk_size": 8, "token_budget": 32}),
        (40, {"chunk_size": 64}),
    ],
    ids=["roomy", "chunks", "speculation", "preemptions", "tight"],
)
async def test_groups_change_no_token(folder: Path, num_blocks: int, options: dict[str, object]) -> None:
    found = []
    for groups in (False, True):
        async with services() as world:
            found.append(await outputs(world, folder, groups=groups, num_blocks=num_blocks, **options))
    plain, grouped = found
    assert [each.token_ids for each in grouped] == [each.token_ids for each in plain]
    assert grouped[4].usage.cached_tokens > 0
    assert num_blocks > 90 or sum(each.usage.num_preemptions for each in grouped) > 0


async def test_a_service_with_a_host_tier_serves_all_layers_in_one_block(world: Services, folder: Path) -> None:
    await world.start_cache(num_host_blocks=32)
    engine = await world.start_engine(model_of(folder, groups=True))
    output = await generate(await world.client(engine), PROMPTS[1], 4, GREEDY)
    assert len(output.token_ids[0]) == 4
    assert not (await world.pool()).pool.spec.groups
