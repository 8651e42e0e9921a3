"""Models whose layers have K and V of several shapes, and share them, through both services: the tokens of transformers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from tests.e2e.test_recurrent import NUM_NEW, PROMPTS, crowd, ids_of
from tests.support.models.tiny_models import build_model_folder, quiet_transformers, tiny_model
from tests.support.processes.service_pair import BLOCK_SIZE, Output, Services, generate, services, until

pytestmark = pytest.mark.in_turn


@pytest.fixture(scope="module", params=["gemma4_e2b", "gemma4_26b"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"), tiny_model(request.param))


@pytest.fixture(scope="module")
def model(folder: Path) -> ServedModel:
    return served(folder)


def served(folder: Path, **options: Any) -> ServedModel:
    return load_served_model(EngineConfig(model=str(folder), progress=False, block_size=BLOCK_SIZE, **options))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What transformers says after each prompt, greedily, computing all of it for each token."""
    with quiet_transformers():
        network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        rest = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NUM_NEW, "use_cache": False}
        texts = [network.generate(torch.tensor([prompt]), **rest)[0].tolist() for prompt in PROMPTS]
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]


@pytest.fixture(scope="module")
def undisturbed(model: ServedModel) -> list[Output]:
    async def run() -> list[Output]:
        async with services() as world:
            return await crowd(world, model, num_blocks=1200)

    return asyncio.run(run())


async def test_the_tokens_are_those_of_transformers(undisturbed: list[Output], expected: list[list[int]]) -> None:
    assert ids_of(undisturbed)[:12] == [[tokens] for tokens in expected * 3]
    assert [output.usage.cached_tokens for output in undisturbed[:4]] == [0, 0, 0, 0]
    whole_blocks = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS]
    assert [output.usage.cached_tokens for output in undisturbed[4:8]] == whole_blocks
    assert len({tuple(tokens) for output in undisturbed[12:15] for tokens in output.token_ids}) == 9


@pytest.mark.parametrize(
    ("num_blocks", "options"),
    [
        (1200, {"overlap": False}),
        (50, {"preemption": "recompute"}),
        (50, {"preemption": "swap", "num_host_blocks": 900}),
        (200, {"chunk_size": 7, "token_budget": 16}),
        (1200, {"speculation": "prompt-look-up"}),
    ],
    ids=["in-turn", "recompute", "swap", "tight", "guesses"],
)
async def test_no_token_changes(
    world: Services, model: ServedModel, undisturbed: list[Output], num_blocks: int, options: dict[str, Any]
) -> None:
    found = await crowd(world, model, num_blocks=num_blocks * (2 if len(model.groups) > 2 else 1), **options)
    assert ids_of(found) == ids_of(undisturbed)
    assert num_blocks > 50 or sum(output.usage.num_preemptions for output in found) >= 5


async def test_requests_outlive_the_cache_service(world: Services, model: ServedModel, expected: list[list[int]]) -> None:
    await world.start_cache(num_blocks=400)
    engine = await world.start_engine(model)
    client = await world.client(engine)
    rest = [asyncio.create_task(generate(client, prompt, NUM_NEW)) for prompt in PROMPTS]

    async def have_begun() -> bool:
        return engine.engine.stats.num_new_tokens >= 10

    await until(have_begun)
    await world.stop_cache()
    await world.start_cache(num_blocks=400)
    assert [(await each).token_ids for each in rest] == [[tokens] for tokens in expected]


async def test_two_ranks_give_the_tokens_of_one(world: Services, folder: Path, expected: list[list[int]]) -> None:
    """Heads are split group by group; where a group has one head, both ranks have it."""
    await world.start_cache(num_blocks=600)
    client = await world.client(await world.start_engine(model_folder=folder, tensor_parallel=2))
    outputs = await asyncio.gather(*(generate(client, prompt, NUM_NEW) for prompt in PROMPTS * 2))
    assert ids_of(outputs) == [[tokens] for tokens in expected * 2]
    spec = (await world.pool()).pool.spec
    heads = [(spec.num_kv_heads, spec.head_dim), *{(each.num_kv_heads, each.head_dim) for each in spec.groups[1:]} - {(0, 0)}]
    assert heads == [(1, 16), (1 if spec.groups[1].num_kv_heads == 1 else 2, 8)]


async def test_it_guesses_for_itself(world: Services, folder: Path, model: ServedModel, expected: list[list[int]]) -> None:
    """As a draft of itself it is always right: each of its groups has blocks of its own."""
    await world.start_cache(num_blocks=600)
    client = await world.client(await world.start_engine(model, speculation="draft-model", draft_model=str(folder)))
    outputs = [await generate(client, prompt, NUM_NEW) for prompt in PROMPTS]
    assert ids_of(outputs) == [[tokens] for tokens in expected]
    assert (await client.stats()).acceptance_rate > 0.95


@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"groups": False}], ids=["few-bits", "one-table"])
def test_what_needs_blocks_of_one_shape_is_refused(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="K and V of several shapes"):
        served(folder, **options)


async def test_a_host_tier_in_fewer_bits_rounds_little(world: Services, model: ServedModel, expected: list[list[int]]) -> None:
    """What comes back from it is near enough to what went there for most tokens to be as they were."""
    cache = {"num_blocks": 40 * len(model.groups), "num_host_blocks": 900, "host_kv_dtype": "int8"}
    client = await world.serve(model, cache=cache)
    outputs = await asyncio.gather(*(generate(client, prompt, NUM_NEW) for prompt in PROMPTS * 6))
    pool = await world.wait_idle()
    assert pool.pool.host_block_bytes < pool.pool.block_bytes / 2
    assert pool.num_promoted_blocks > 0
    equal = sum(output.token_ids == [tokens] for output, tokens in zip(outputs, expected * 6, strict=True))
    assert equal > len(outputs) / 2
