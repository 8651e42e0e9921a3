"""Conversations whose turns end anywhere: the next turn starts where the last one ended, with the tokens of a cold run."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvkeeper.client import Sampling
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import EngineConfig
from tests.support.models.tiny_models import TinyModel, build_model_folder, random_tokens, tiny_model
from tests.support.processes.service_pair import BLOCK_SIZE, OVERLAP, Output, Services, generate

NUM_TURNS = 8
GREEDY = Sampling(temperature=0, repetition_penalty=1.0, ignore_eos=True)
SAMPLED = Sampling(temperature=1.0, seed=7, ignore_eos=True)
_WHAT_USERS_SAY = [random_tokens(5 + turn, seed=turn) for turn in range(NUM_TURNS)]
_NUM_NEW = [6 + turn for turn in range(NUM_TURNS)]


@pytest.fixture(scope="module", params=["llama", "qwen3_5_35b_a3b", "nemotron_3_nano", "gemma4_e2b", "kimi_linear"])
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


async def test_a_token_that_ends_a_request_is_found_with_it(world: Services, model: ServedModel) -> None:
    """It is computed before it is seen, so the states are behind it."""
    client = await world.serve(model, cache={"num_blocks": 400})
    prompt = random_tokens(9, seed=1)
    (drawn,) = (await generate(client, prompt, 12, GREEDY)).token_ids
    for num_drawn in range(2, 9):
        end = drawn[num_drawn - 1]
        if end in drawn[: num_drawn - 1]:
            continue
        salt = f"turn {num_drawn}"
        first = await generate(client, prompt, 12, replace(GREEDY, stop_token_ids=(end,)), cache_salt=salt)
        assert first.reasons == ["stop"]
        await world.wait_idle()  # the step behind the end is computed, and the sequence released
        history = [*prompt, *drawn[:num_drawn]]
        second = await generate(client, [*history, 77, 78], 4, GREEDY, cache_salt=salt)
        assert second.usage.cached_tokens == len(history) - (not OVERLAP)
        assert second.token_ids == (await generate(client, [*history, 77, 78], 4, GREEDY, cache_salt="cold" + salt)).token_ids


@pytest.mark.parametrize(
    ("cache", "options"),
    [
        ({"num_blocks": 400}, {"overlap": False}),
        ({"num_blocks": 400}, {"chunk_size": 3}),
        ({"num_blocks": 110}, {}),
        ({"num_blocks": 110, "num_host_blocks": 300}, {}),
        ({"num_blocks": 110, "num_host_blocks": 300}, {"preemption": "recompute"}),
        ({"num_blocks": 110, "eviction_policy": "lru", "prefix_ttl": 0.05}, {}),
    ],
    ids=["in-turn", "chunks", "short", "host-tier", "recompute", "time-to-live"],
)
async def test_no_token_changes(world: Services, model: ServedModel, cache: dict[str, Any], options: dict[str, Any]) -> None:
    """Of several conversations at once, some of which have begun alike, whatever is evicted, moved or computed again."""
    expected = await cold(world, model, SAMPLED)
    client = await world.serve(model, cache=cache, **options)
    found = await asyncio.gather(*(talk(client, SAMPLED, cache_salt=salt) for salt in ("", "", "a", "b")))
    assert [tokens(outputs) for outputs, _ in found] == [expected] * 4
    pool = await world.wait_idle()
    assert pool.num_partial_hits > 0


async def test_a_cache_service_that_dies_between_the_copy_and_the_first_write_changes_no_token(
    world: Services, model: ServedModel
) -> None:
    prompt = random_tokens(9, seed=1)
    await world.start_cache(num_blocks=400)
    engine, gate = await world.start_late_engine(17, model)  # tokens: of the prompt, and 6 that are drawn and computed
    client = await world.client(engine)
    (drawn,) = (await generate(client, prompt, 7, GREEDY)).token_ids
    second = asyncio.create_task(generate(client, [*prompt, *drawn, 77], 6, GREEDY))
    await gate.reached()
    assert (await world.pool()).num_partial_hits == 1
    await world.stop_cache()
    gate.is_open.set()
    await world.start_cache(num_blocks=400)
    again = await generate(client, [*prompt, *drawn, 77], 6, GREEDY, cache_salt="cold")
    assert (await second).token_ids == again.token_ids
    assert list((await (await world.cache_client()).check_invariants()).violations) == []


async def test_prompts_that_part_leave_what_they_have_in_common(world: Services, model: ServedModel) -> None:
    """With checkpoints far apart, the third prompt that begins alike finds it all."""
    client = await world.serve(model, cache={"num_blocks": 400})
    common = random_tokens(30, seed=3)
    outputs = [await generate(client, [*common, *random_tokens(7, seed=seed)], 6, GREEDY) for seed in (4, 5, 6)]
    cold = [await generate(client, [*common, *random_tokens(7, seed=seed)], 6, GREEDY, skip_look_up=True) for seed in (4, 5, 6)]
    assert tokens(outputs) == tokens(cold)
    whole = len(common) // BLOCK_SIZE * BLOCK_SIZE
    has_states = any(group.state_bytes for group in (await world.pool()).pool.spec.groups)
    assert [output.usage.cached_tokens for output in outputs] == [0, 0 if has_states else whole, whole]
