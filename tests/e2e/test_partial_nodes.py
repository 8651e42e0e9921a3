"""Conversations whose turns end anywhere: the next turn starts where the last one ended, with the tokens of a cold run."""

from typing import Any

import pytest

from kvkeeper.client import Sampling
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import EngineConfig
from tests.support.models.tiny_models import TinyModel, build_model_folder, random_tokens, tiny_model
from tests.support.processes.service_pair import BLOCK_SIZE, Output, Services, generate

NUM_TURNS = 8
GREEDY = Sampling(temperature=0, repetition_penalty=1.0, ignore_eos=True)
SAMPLED = Sampling(temperature=1.0, seed=7, ignore_eos=True)
_WHAT_USERS_SAY = [random_tokens(5 + turn, seed=turn) for turn in range(NUM_TURNS)]
_NUM_NEW = [6 + turn for turn in range(NUM_TURNS)]


@pytest.fixture(scope="module", params=["llama", "qwen3_next", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    kind = tiny_model(request.param)
    folder = build_model_folder(tmp_path_factory.mktemp("model"), TinyModel(kind.name, kind.family, kind.overrides))
    options: dict[str, Any] = {"block_size": BLOCK_SIZE}
    return load_served_model(EngineConfig(model=str(folder), progress=False, **options))


async def talk(client: Any, sampling: Sampling = GREEDY, **options: Any) -> tuple[list[Output], list[int]]:
    """The outputs of all turns, and how many tokens there were before each."""
    outputs, history, lens = [], list[int](), []
    for said, num_new in zip(_WHAT_USERS_SAY, _NUM_NEW, strict=True):
        lens.append(len(history))
        history += said
        outputs.append(await generate(client, history, num_new, sampling, **options))
        history += outputs[-1].token_ids[0]
    return outputs, lens


def tokens(outputs: list[Output]) -> list[list[list[int]]]:
    return [output.token_ids for output in outputs]


async def cold(world: Services, model: ServedModel, *args: Any, **options: Any) -> list[list[list[int]]]:
    """What comes where nothing is cached."""
    client = await world.serve(model, cache={"num_blocks": 400, "prefix_caching": False})
    outputs, _ = await talk(client, *args, **options)
    assert not any(output.usage.cached_tokens for output in outputs)
    for engine in world.engines:
        await engine.stop()
    await world.stop_cache()
    return tokens(outputs)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_turn_starts_where_the_last_one_ended(world: Services, model: ServedModel, sampling: Sampling) -> None:
    expected = await cold(world, model, sampling)
    client = await world.serve(model, cache={"num_blocks": 400})
    outputs, lens = await talk(client, sampling)
    assert tokens(outputs) == expected
    # The last token that was drawn has not been computed.
    assert [output.usage.cached_tokens for output in outputs] == [0, *(length - 1 for length in lens[1:])]
    pool = await world.wait_idle()
    assert pool.num_partial_hits == sum((length - 1) % BLOCK_SIZE > 0 for length in lens[1:])
