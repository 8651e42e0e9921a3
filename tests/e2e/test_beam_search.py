"""Beam search through both services: the token lists and scores of transformers' generate, through preemption and faults."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvkeeper.client import AsyncEngineClient, BeamSearch, GenerateOptions, OutputChunk, Sampling
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from tests.support.models.odd_models import NAN_TOKEN, odd_model
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model
from tests.support.processes.service_pair import GREEDY, Services, generate, toy_output, until, until_stats
from tests.support.reference.beam_reference import Found, SearchCase, check_told, references
from tests.support.worlds.cache_api import failure

pytestmark = pytest.mark.in_turn

TOY_PROMPT = list(range(3, 12))


@dataclass(frozen=True)
class Searches:
    """A model, searches, and what transformers finds."""

    folder: Path
    cases: list[SearchCase]
    expected: list[list[Found]]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def searches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Searches:
    """Prompts around whole blocks of 4 and 16; tokens that end lists are ones that the same search finds without them."""
    folder = build_model_folder(tmp_path_factory.mktemp("model"), tiny_model(request.param))
    plain = [SearchCase(random_tokens(length, seed=length), 4, 4, 11) for length in (3, 8, 15, 16, 17)]
    found = references(folder, plain)
    ends = [tuple({lists[1].token_ids[4], lists[3].token_ids[6]}) for lists in found]
    cases = [
        *plain[:2],
        SearchCase(plain[2].prompt, 2, 1, 9),
        SearchCase(plain[3].prompt, 5, 2, 9, repetition_penalty=1.4),
        SearchCase(plain[0].prompt, 4, 3, 11, eos_token_ids=ends[0]),
        SearchCase(plain[1].prompt, 3, 3, 11, length_penalty=0.0, eos_token_ids=ends[1][:1]),
        SearchCase(plain[2].prompt, 4, 4, 11, length_penalty=-1.5, early_stopping=True, eos_token_ids=ends[2]),
        SearchCase(plain[3].prompt, 3, 1, 14, length_penalty=2.5, eos_token_ids=ends[3][:1]),
        SearchCase(plain[4].prompt, 6, 6, 11, early_stopping=True, eos_token_ids=ends[4]),
        SearchCase(plain[4].prompt, 4, 4, 11, eos_token_ids=ends[4], min_tokens=9),
        SearchCase(
            plain[0].prompt,
            4,
            3,
            9,
            bad_words=(found[0][0].token_ids[:1], found[0][1].token_ids[1:3], found[0][2].token_ids[3:6]),
            bias=((found[0][0].token_ids[2], -2.0), (found[0][1].token_ids[5], 0.75)),
            repetition_penalty=1.2,
        ),
    ]
    return Searches(folder, cases, [*found[:2], *references(folder, cases[2:])])


async def start(world: Services, folder: Path, block_size: int = 4, **engine: object) -> AsyncEngineClient:
    model = load_served_model(EngineConfig(model=str(folder), progress=False, block_size=block_size))
    return await world.client(await world.start_engine(model, block_size=block_size, **engine))


async def search(client: AsyncEngineClient, case: SearchCase) -> list[OutputChunk]:
    return [chunk async for chunk in client.generate(case.prompt, case.options)]


async def check_all(client: AsyncEngineClient, searches: Searches, expected: Sequence[list[Found]] | None = None) -> None:
    told = await asyncio.gather(*(search(client, case) for case in searches.cases))
    for case, chunks, found in zip(searches.cases, told, expected or searches.expected, strict=True):
        check_told(case, chunks, found)


def test_the_searches_show_what_they_are_for(searches: Searches) -> None:
    by_end = [
        [found.token_ids[-1] in case.eos_token_ids for found in lists]
        for case, lists in zip(searches.cases, searches.expected, strict=True)
    ]
    assert sum(any(ended) for ended in by_end) >= 3, "lists that end early"
    assert any(any(ended) and not all(ended) for ended in by_end), "beside others that do not"
    assert all(len({found.token_ids for found in lists}) == len(lists) for lists in searches.expected)


@pytest.mark.parametrize("block_size", [1, 4, 16])
async def test_several_at_once_beside_sampled_requests(world: Services, searches: Searches, block_size: int) -> None:
    await world.start_cache(num_blocks=1200 // block_size)
    client = await start(world, searches.folder, block_size)
    sampled = [(list(random_tokens(9, seed=place)), Sampling(temperature=1.0, seed=place)) for place in range(3)]
    alone = [await generate(client, prompt, 20, sampling) for prompt, sampling in sampled]
    beside = asyncio.gather(*(generate(client, prompt, 20, sampling) for prompt, sampling in sampled))
    await check_all(client, searches)
    assert [output.token_ids for output in await beside] == [output.token_ids for output in alone]
    pool = await world.wait_idle()
    assert pool.num_referenced_blocks == 0
    assert pool.num_forks > 50
    assert (pool.num_copies_on_write > 50) == (block_size > 1), "lists part in the middle of a block"
    assert (await client.stats()).num_preemptions == 0


@pytest.mark.parametrize("way", ["recompute", "swap"])
async def test_with_too_little_room(world: Services, searches: Searches, way: str) -> None:
    await world.start_cache(num_blocks=20, num_host_blocks=200)
    client = await start(world, searches.folder, preemption=way)
    await check_all(client, searches)
    stats = await client.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_out > 0) == (way == "swap")
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_the_cache_service_is_lost_in_mid_search(world: Services, searches: Searches) -> None:
    await world.start_cache(num_blocks=300)
    client = await start(world, searches.folder)
    checking = asyncio.create_task(check_all(client, searches))
    for num_tokens in (40, 90):

        async def has_tokens(num: int = num_tokens) -> bool:
            return (await client.stats()).num_new_tokens >= num

        await until(has_tokens)
        await world.stop_cache()
        await world.start_cache(num_blocks=300)
    await checking
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_submitted_asked_for_and_counted(world: Services, searches: Searches) -> None:
    await world.start_cache(num_blocks=300)
    client = await start(world, searches.folder)
    case = searches.cases[0]
    first = await client.result(await client.submit(case.prompt, case.options), wait_s=20)
    again = await client.result(await client.submit(case.prompt, case.options), wait_s=20)
    check_told(case, first.outputs, searches.expected[0])
    assert first.outputs == again.outputs, "also behind a prefix that was cached"
    assert first.usage is not None
    assert first.usage.new_tokens == case.num_beams * case.max_tokens, "those of lists that were given up too"
    stats = await client.stats()
    assert stats.num_new_tokens == 2 * case.num_beams * (case.max_tokens - 1), "what ends a search is not computed further"


async def test_cancelled_it_tells_its_end_alone_and_gives_all_back(world: Services) -> None:
    client = await world.serve()
    sampling = Sampling(max_tokens=150, repetition_penalty=1.0)
    options = GenerateOptions(n=2, request_id="mine", beam_search=BeamSearch(3), sampling=sampling)
    reading = asyncio.create_task(read(client, options))

    await until_stats(client, lambda stats: stats.num_new_tokens > 20)
    await client.cancel("mine")
    chunks = await reading
    assert [(chunk.index, chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [
        (0, (), "cancelled"),
        (1, (), "cancelled"),
    ]
    assert (await world.wait_idle()).num_referenced_blocks == 0
    assert (await generate(client, TOY_PROMPT)).token_ids == [toy_output(TOY_PROMPT, 8)]


async def read(client: AsyncEngineClient, options: GenerateOptions) -> list[OutputChunk]:
    return [chunk async for chunk in client.generate(TOY_PROMPT, options)]


@pytest.mark.parametrize("num_blocks", [8, 64])
async def test_every_list_is_scored_by_its_own_tokens(world: Services, num_blocks: int) -> None:
    """The toy gives the next token a logit of 30 and all others 0: a list that read another list's blocks would show."""
    client = await world.serve(cache={"num_blocks": num_blocks})
    sampling = Sampling(max_tokens=14, repetition_penalty=1.0, ignore_eos=True)
    chunks = await read(client, GenerateOptions(n=4, beam_search=BeamSearch(4), sampling=sampling))
    assert list(chunks[0].token_ids) == toy_output(TOY_PROMPT, 14)
    assert len({chunk.token_ids for chunk in chunks}) == 4
    for chunk in chunks:
        tokens = [*TOY_PROMPT, *chunk.token_ids]
        strays = sum(toy_output(tokens[:place], 1) != [tokens[place]] for place in range(len(TOY_PROMPT), len(tokens)))
        assert chunk.cumulative_logprob == pytest.approx(-30 * strays, abs=1e-3)
    assert ((await client.stats()).num_preemptions > 0) == (num_blocks == 8)


async def test_a_model_that_breaks_ends_its_search_alone(world: Services) -> None:
    client = await world.serve(odd_model())
    good = asyncio.create_task(generate(client, [1, 2, 3], 30))
    failed = await failure(generate(client, [4, 5, NAN_TOKEN], 8, GREEDY, beam_search=BeamSearch(3)))
    assert failed.reason == "REQUEST_FAILED"
    assert (await good).token_ids == [toy_output([1, 2, 3], 30)]
    assert (await world.wait_idle()).num_referenced_blocks == 0


async def test_more_beams_than_can_run_are_refused_with_the_limit(world: Services) -> None:
    client = await world.serve(max_sequences=3)
    refused = await failure(generate(client, TOY_PROMPT, 8, GREEDY, beam_search=BeamSearch(4)))
    assert refused.reason == "NEVER_FITS"
    assert refused.metadata == {"requested": "4", "limit": "3"}
    assert len((await generate(client, TOY_PROMPT, 8, GREEDY, n=3, beam_search=BeamSearch(3))).token_ids) == 3
