"""best_of through both services: the same draws as n continuations, of which the client gets the likeliest."""

import dataclasses
from pathlib import Path

import pytest

from kvkeeper.client import AsyncEngineClient, GenerateOptions, OutputChunk, Sampling
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from tests.support.models.tiny_models import TINY_MODELS, build_model_folder, random_tokens
from tests.support.processes.service_pair import BLOCK_SIZE, Services

PROMPT = random_tokens(3 * BLOCK_SIZE + 1, seed=5)
SAMPLING = Sampling(max_tokens=7, temperature=1.0, seed=3, repetition_penalty=1.0, num_logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"), TINY_MODELS[0])


async def start(world: Services, folder: Path, **engine: object) -> AsyncEngineClient:
    model = load_served_model(EngineConfig(model=str(folder), progress=False, block_size=BLOCK_SIZE))
    return await world.client(await world.start_engine(model, **engine))


async def run(client: AsyncEngineClient, options: GenerateOptions) -> tuple[list[OutputChunk], int]:
    generation = client.generate(PROMPT, options)
    chunks = [chunk async for chunk in generation]
    assert generation.usage is not None
    return chunks, generation.usage.new_tokens


async def test_the_likeliest_of_the_continuations_that_n_gives(world: Services, folder: Path) -> None:
    await world.start_cache()
    client = await start(world, folder)
    all_chunks, num_new = await run(client, GenerateOptions(n=6, sampling=SAMPLING))
    own: list[list[OutputChunk]] = [[chunk for chunk in all_chunks if chunk.index == index] for index in range(6)]
    tokens = [tuple(token for chunk in chunks for token in chunk.token_ids) for chunks in own]
    logprobs = [[one.logprob for chunk in chunks for one in chunk.logprobs] for chunks in own]
    assert len(set(tokens)) == 6
    order = sorted(range(6), key=lambda index: -sum(logprobs[index]) / len(logprobs[index]))
    assert order != list(range(6)), "or ranking would not show"

    told, num_computed = await run(client, GenerateOptions(n=2, best_of=6, sampling=SAMPLING))
    assert [(chunk.index, chunk.token_ids) for chunk in told] == [(place, tokens[order[place]]) for place in range(2)]
    sums = [sum(logprobs[index]) for index in order[:2]]
    assert [chunk.cumulative_logprob for chunk in told] == pytest.approx(sums, abs=1e-5)
    assert [chunk.finish_reason for chunk in told] == ["length", "length"]
    assert num_computed == num_new == 42, "all that was computed is counted"
    assert (await client.stats()).num_new_tokens == 84

    plain = dataclasses.replace(SAMPLING, num_logprobs=None)
    request_id = await client.submit(PROMPT, GenerateOptions(n=2, best_of=6, sampling=plain))
    result = await client.result(request_id, wait_s=20)
    assert [chunk.token_ids for chunk in result.outputs] == [chunk.token_ids for chunk in told]
    assert [chunk.cumulative_logprob for chunk in result.outputs] == pytest.approx(sums, abs=1e-5)
    assert not any(chunk.logprobs for chunk in result.outputs)
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_with_too_little_room_for_all_at_once(world: Services, folder: Path) -> None:
    await world.start_cache(num_blocks=9)
    client = await start(world, folder)
    told, _ = await run(client, GenerateOptions(n=2, best_of=6, sampling=SAMPLING))
    assert (await client.stats()).num_preemptions > 0
    await world.stop_cache()
    await world.start_cache()
    roomy = await start(world, folder)
    assert [chunk.token_ids for chunk in told] == [
        chunk.token_ids for chunk in (await run(roomy, GenerateOptions(n=2, best_of=6, sampling=SAMPLING)))[0]
    ]
