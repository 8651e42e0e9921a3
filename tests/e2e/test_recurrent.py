"""A model with recurrent layers through both services: the tokens of transformers, whatever becomes of its states."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvkeeper.client import (
    AsyncCacheClient,
    AsyncEngineClient,
    BeamSearch,
    CallOptions,
    KvkeeperError,
    Retention,
    Sampling,
)
from kvkeeper.common.service.process import StartError
from kvkeeper.engine_service.compute import model_runner
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.recurrent.state_pages import state_arrays
from kvkeeper.engine_service.values.batch import Batch, IntArray
from tests.e2e.test_take_over import take_over
from tests.support.models.tiny_models import (
    TINY_MODELS,
    build_model_folder,
    quiet_transformers,
    random_tokens,
    tiny_model,
)
from tests.support.models.wrapped import wrap
from tests.support.processes.fleet import fleet
from tests.support.processes.service_pair import BLOCK_SIZE, Output, Services, generate, services, until

pytestmark = pytest.mark.in_turn

CHECKPOINT = 2 * BLOCK_SIZE
PROMPTS = [random_tokens(length, seed=length) for length in (3, 8, 17, 40)]
NUM_NEW = 20
SAMPLED = Sampling(temperature=1.0, seed=7)


# Alone, or with towers beside them as they are released; and the groups that their layers come in.
KINDS = {
    "kimi_linear": ("", 6),
    "lfm2_moe": ("", 2),
    "ling_3": ("", 5),
    "nemotron_3_nano": ("", 4),
    "qwen3_5_27b": ("qwen3_5", 3),
    "qwen3_5_35b_a3b": ("qwen3_5_moe", 4),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_model_folder(tmp_path_factory.mktemp("model"), tiny_model(kind))
    wrapper, _ = KINDS[kind]
    return wrap(folder, wrapper=wrapper) if wrapper else folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What transformers says after each prompt, greedily, computing all of it again for each token."""
    with quiet_transformers():
        network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        rest = {"use_cache": False, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NUM_NEW}
        texts = [network.generate(torch.tensor([prompt]), **rest)[0].tolist() for prompt in PROMPTS]
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]


@pytest.fixture(scope="module")
def model(folder: Path) -> ServedModel:
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "checkpoint_tokens": CHECKPOINT}
    return load_served_model(EngineConfig(model=str(folder), progress=False, **options))


async def crowd(
    world: Services, model: ServedModel, *, num_blocks: int = 400, num_host_blocks: int = 0, **options: Any
) -> list[Output]:
    """Greedy outputs one by one and at once, then continuations and beams, on services of their own."""
    client = await world.serve(model, **options, cache={"num_blocks": num_blocks, "num_host_blocks": num_host_blocks})
    found = [await generate(client, prompt, NUM_NEW) for prompt in PROMPTS]
    found += await asyncio.gather(*(generate(client, prompt, NUM_NEW) for prompt in PROMPTS * 2))
    found += await asyncio.gather(*(generate(client, prompt, NUM_NEW, SAMPLED, n=3) for prompt in PROMPTS[1:]))
    found += [await generate(client, prompt, 8, n=2, beam_search=BeamSearch(3)) for prompt in PROMPTS[1:3]]
    pool = await world.wait_idle()
    assert len(pool.pool.spec.groups) == len(model.groups) > 1
    return found


def ids_of(outputs: Sequence[Output]) -> list[list[list[int]]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def undisturbed(model: ServedModel) -> list[Output]:
    async def run() -> list[Output]:
        async with services() as world:
            return await crowd(world, model)

    return asyncio.run(run())


async def test_the_tokens_are_those_of_transformers(
    kind: str, model: ServedModel, undisturbed: list[Output], expected: list[list[int]]
) -> None:
    assert (model.text_part_of, len(model.groups)) == KINDS[kind]
    assert ids_of(undisturbed)[:12] == [[tokens] for tokens in expected * 3]
    assert [output.usage.cached_tokens for output in undisturbed[:4]] == [0, 0, 0, 0]
    # A hit ends at a checkpoint, and one token is left to compute.
    assert [output.usage.cached_tokens for output in undisturbed[4:8]] == [0, 0, 16, 32]
    assert len({tuple(tokens) for output in undisturbed[12:15] for tokens in output.token_ids}) == 9


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("num_blocks", "options"),
    [
        (400, {"overlap": False}),
        (60, {"preemption": "recompute"}),
        (60, {"preemption": "swap", "num_host_blocks": 300}),
        (400, {"max_sequences": 3}),
        (90, {"chunk_size": 7, "token_budget": 16}),
    ],
    ids=["in-turn", "recompute", "swap", "few-rows", "tight"],
)
async def test_no_token_changes(
    world: Services, model: ServedModel, undisturbed: list[Output], num_blocks: int, options: dict[str, Any]
) -> None:
    is_short = num_blocks == 60
    if is_short:  # and yet enough for the longest sequence
        num_blocks = max(num_blocks, 15 * len(model.groups))
    found = await crowd(world, model, num_blocks=num_blocks, **options)
    assert ids_of(found) == ids_of(undisturbed)
    assert not is_short or sum(output.usage.num_preemptions for output in found) > 0


async def test_requests_outlive_the_cache_service(world: Services, model: ServedModel, expected: list[list[int]]) -> None:
    await world.start_cache(num_blocks=100)
    engine = await world.start_engine(model)
    client = await world.client(engine)
    rest = [asyncio.create_task(generate(client, prompt, NUM_NEW)) for prompt in PROMPTS]

    async def have_begun() -> bool:
        return engine.engine.stats.num_new_tokens >= 10

    await until(have_begun)
    await world.stop_cache()
    await world.start_cache(num_blocks=100)
    assert [(await each).token_ids for each in rest] == [[tokens] for tokens in expected]


async def test_another_engine_computes_them_again_from_a_checkpoint(
    world: Services, model: ServedModel, expected: list[list[int]]
) -> None:
    await world.start_cache(num_blocks=400)
    giver, gate = await world.start_late_engine(len(PROMPTS[3]) + 9, model)
    client = await world.client(giver)
    running = asyncio.create_task(generate(client, PROMPTS[3], NUM_NEW))
    await gate.reached()
    taker = await take_over(world, giver, gate, model)
    assert (await running).token_ids == [expected[3]]
    assert (await world.pool()).num_hand_offs == 0
    assert taker.engine.stats.num_prefill_tokens == 0, "the whole prompt is before the last checkpoint"


async def test_a_conversation_goes_on_where_a_killed_engine_left_it(folder: Path, expected: list[list[int]]) -> None:
    """The engine dies within a forward pass of the second turn; another one finds the states where the first turn ended."""
    prompt, (first, second) = PROMPTS[2], (expected[2][:5], expected[2][5:])
    flags = {"model": str(folder), "checkpoint_tokens": CHECKPOINT}
    stops = {"stop_every": 1, "stop_seed": 0}
    async with fleet(2, {"num_blocks": 400}, first_flags=stops, **flags) as found:
        dying, living = (AsyncEngineClient(address, CallOptions(retry_s=0)) for address in found.engine_addresses)
        async with dying, living:
            assert (await generate(dying, prompt, len(first))).token_ids == [first]
            lost = asyncio.create_task(generate(dying, [*prompt, *first], len(second)))
            await found.engines[0].until_stopped()
            await found.engines[0].kill()
            with pytest.raises(KvkeeperError):
                await lost
            output = await generate(living, [*prompt, *first], len(second))
        assert (output.token_ids, output.usage.cached_tokens) == ([second], len(prompt) + len(first) - 1)
        async with AsyncCacheClient(found.cache_address, CallOptions(retry_s=0)) as cache:
            assert list((await cache.check_invariants()).violations) == []


async def test_a_sink_and_a_window_are_refused(world: Services, model: ServedModel) -> None:
    client = await world.serve(model, cache={"num_blocks": 100})
    with pytest.raises(KvkeeperError, match="a model with recurrent layers"):
        await generate(client, PROMPTS[2], 4, retention=Retention(4, 8))


async def test_it_makes_no_guesses_for_another_model(world: Services, folder: Path, tmp_path: Path) -> None:
    await world.start_cache()
    other = build_model_folder(tmp_path, TINY_MODELS[0])
    with pytest.raises(StartError, match=r"--draft-model .* a guess that is not kept has changed the state"):
        await world.start_engine(model_folder=other, speculation="draft-model", draft_model=str(folder))


async def test_a_checkpoint_that_is_written_too_late_changes_the_tokens_behind_a_hit(
    world: Services, model: ServedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what is compared above would show it."""

    def late(batch: Batch, groups: Sequence[int], block_size: int) -> dict[str, IntArray]:
        """Only the last chunk of each row writes its page."""
        arrays = state_arrays(batch, groups, block_size)
        for group in groups if "state_chunk_starts" in arrays else ():
            pages, last = arrays[f"state_chunk_writes_{group}"], arrays["state_chunk_starts"][1:] - 1
            arrays[f"state_chunk_writes_{group}"] = np.where(np.isin(np.arange(len(pages)), last), pages, 0)
        return arrays

    monkeypatch.setattr(model_runner, "state_arrays", late)
    client = await world.serve(model, cache={"num_blocks": 100 * len(model.groups)})
    assert (await generate(client, PROMPTS[3], NUM_NEW)).token_ids == [expected[3]]
    prompts = [random_tokens(40, seed=seed) for seed in range(8)]
    cold, warm = [[await generate(client, prompt, NUM_NEW) for prompt in prompts] for _ in range(2)]
    assert {output.usage.cached_tokens for output in warm} == {32}
    assert ids_of(cold) != ids_of(warm)
