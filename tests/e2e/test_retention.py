"""Sink and window through both services: more tokens than the pool holds, in the blocks that are kept of them.

The hash toy's next token is a hash of every K and V that its sinks and its window keep, read through the block table: a token
dropped too early, kept too long, or at another position changes it.
"""

import asyncio
import dataclasses
import math
from pathlib import Path

import grpc
import pytest
import torch

from kvkeeper.client import BeamSearch, GenerateOptions, KvkeeperError, Retention
from kvkeeper.engine_service import server
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from tests.e2e.test_speculation import SometimesRight
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model
from tests.support.processes.service_pair import BLOCK_SIZE, GREEDY, Services, generate, toy_output
from tests.support.reference.within_cache import load_network, within_cache_logits
from tests.support.worlds.cache_api import failure

KEPT = Retention(num_sink_tokens=3, num_window_tokens=6)
NUM_HELD = 1 + 1 + 2  # blocks: sinks, window, and the block that is being filled with the one that is being left
PROMPT = list(range(3, 16))


@pytest.mark.parametrize("chunk_size", [1, 3, 512])
async def test_ten_times_the_pool_is_generated_in_it(world: Services, chunk_size: int) -> None:
    client = await world.serve(chunk_size=chunk_size, cache={"num_blocks": 1 + NUM_HELD, "max_tokens_per_sequence": 400})
    prompt = PROMPT * 4  # 52 tokens, in a pool of 16
    num_new = 10 * NUM_HELD * BLOCK_SIZE
    output = await generate(client, prompt, num_new, retention=KEPT)
    assert output.token_ids == [toy_output(prompt, num_new, KEPT)]
    assert output.usage.num_preemptions == 0
    pool = await world.wait_idle()
    num_dropped = (len(prompt) + num_new - 1 - KEPT.num_window_tokens) // BLOCK_SIZE - 1
    assert pool.num_retention_dropped_blocks == num_dropped
    assert pool.num_evicted_blocks >= num_dropped
    assert pool.peak_used_blocks <= NUM_HELD
    assert (await client.stats()).num_prefill_tokens == len(prompt), "each once"


async def test_what_is_kept_and_what_keeps_everything_share_a_batch_and_a_pool(world: Services) -> None:
    """The pool is too small for all at once: a preempted sequence computes the same again."""
    client = await world.serve(chunk_size=5, cache={"num_blocks": 20})
    prompts = [[place + 1, *PROMPT] for place in range(6)]
    chosen = [None if place % 3 == 2 else Retention(place, 4 + place) for place in range(6)]
    outputs = await asyncio.gather(
        *(generate(client, prompt, 40, n=1 + place % 2, retention=chosen[place]) for place, prompt in enumerate(prompts))
    )
    for prompt, output, kept in zip(prompts, outputs, chosen, strict=True):
        assert all(tokens == toy_output(prompt, 40, kept) for tokens in output.token_ids)
    assert (await client.stats()).num_preemptions > 0


async def test_what_is_swapped_out_comes_back_with_its_holes(world: Services) -> None:
    client = await world.serve(chunk_size=5, preemption="swap", cache={"num_blocks": 12, "num_host_blocks": 65})
    prompts = [[place + 1, *PROMPT] for place in range(5)]
    chosen = [None if place == 2 else Retention(place, 5 + place) for place in range(5)]
    outputs = await asyncio.gather(
        *(generate(client, prompt, 25, retention=chosen[place], skip_look_up=True) for place, prompt in enumerate(prompts))
    )
    for prompt, output, kept in zip(prompts, outputs, chosen, strict=True):
        assert output.token_ids == [toy_output(prompt, 25, kept)]
    stats = await client.stats()
    assert stats.num_swapped_out > 0
    assert stats.num_prefill_tokens == sum(map(len, prompts)), "each prompt once"


async def test_a_prompt_shares_what_lies_below_sink_and_window(world: Services) -> None:
    client = await world.serve()
    prompt = PROMPT * 3
    hits = []
    for kept in (None, KEPT, None, Retention(0, 20), Retention(3, 200)):
        output = await generate(client, prompt, 8, retention=kept)
        assert output.token_ids == [toy_output(prompt, 8, kept)]
        hits.append(output.usage.cached_tokens)
    assert hits == [0, 8, 36, 20, 36], "the last keeps everything, and is as if it had said nothing"


async def test_with_speculation_the_tokens_are_the_same(world: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PromptLookUp", SometimesRight)
    client = await world.serve(
        speculation="prompt-look-up", cache={"num_blocks": 1 + NUM_HELD + 2, "max_tokens_per_sequence": 400}
    )
    output = await generate(client, PROMPT, 150, retention=Retention(3, 6))
    assert output.token_ids == [toy_output(PROMPT, 150, KEPT)]
    assert (await client.stats()).num_guessed_tokens > 0


@pytest.mark.parametrize("is_enough", [True, False])
async def test_it_goes_on_in_a_smaller_pool_that_holds_what_it_keeps(world: Services, is_enough: bool) -> None:
    """The cache service comes back; all of the request is computed again, with the same tokens visible."""
    client = await world.serve()
    options = dataclasses.replace(GREEDY, max_tokens=150)
    generation = client.generate(PROMPT, GenerateOptions(sampling=options, retention=KEPT))
    tokens = list((await anext(generation)).token_ids)
    await world.stop_cache()
    await world.start_cache(num_blocks=is_enough + NUM_HELD)
    if is_enough:
        tokens += [token async for chunk in generation for token in chunk.token_ids]
        assert tokens == toy_output(PROMPT, 150, KEPT)
        return
    with pytest.raises(KvkeeperError) as ended:
        [chunk async for chunk in generation]
    assert ended.value.reason == "NEVER_FITS"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
async def test_log_probabilities_are_those_of_positions_within_the_cache(world: Services, family: str, tmp_path: Path) -> None:
    """The tokens that were drawn, scored again without a cache and without rotated keys; the prompt's log probabilities too."""
    folder = build_model_folder(tmp_path, tiny_model(family))
    await world.start_cache(num_blocks=1 + NUM_HELD, max_tokens_per_sequence=900, num_pools=1)
    model = load_served_model(EngineConfig(model=str(folder), progress=False))
    client = await world.client(await world.start_engine(model, chunk_size=7))
    prompt = list(random_tokens(20))
    sampling = dataclasses.replace(GREEDY, temperature=1.0, seed=3, num_logprobs=3, num_prompt_logprobs=0, max_tokens=30)
    options = GenerateOptions(sampling=sampling, retention=KEPT)
    chunks = [chunk async for chunk in client.generate(prompt, options)]
    found = [*chunks[0].prompt_logprobs, *(row for chunk in chunks for row in chunk.logprobs)]
    tokens = prompt + [token for chunk in chunks for token in chunk.token_ids]
    logits = within_cache_logits(load_network(folder), tokens, KEPT.num_sink_tokens, KEPT.num_window_tokens)
    expected = torch.log_softmax(logits, dim=-1)
    assert [row.token_id for row in found] == tokens[1:]
    errors = [abs(row.logprob - float(expected[at, row.token_id])) for at, row in enumerate(found)]
    assert max(errors) <= 1e-4
    assert math.isclose(found[-1].top[0][1], float(expected[-2].max()), abs_tol=1e-4)


@pytest.mark.parametrize("num_blocks", [100, 8])
async def test_beams_score_what_they_see(world: Services, num_blocks: int, tmp_path: Path) -> None:
    """Forks of forks at every length; in the small pool, lists are preempted."""
    folder = build_model_folder(tmp_path, tiny_model("llama"))
    await world.start_cache(num_blocks=num_blocks)
    model = load_served_model(EngineConfig(model=str(folder), progress=False))
    client = await world.client(await world.start_engine(model, chunk_size=7))
    prompt = list(random_tokens(17))
    sampling = dataclasses.replace(GREEDY, max_tokens=25)
    options = GenerateOptions(n=4, beam_search=BeamSearch(num_beams=4), sampling=sampling, retention=KEPT)
    told = [chunk async for chunk in client.generate(prompt, options)]
    network = load_network(folder)
    for chunk in told:
        tokens = prompt + list(chunk.token_ids)
        logits = within_cache_logits(network, tokens, KEPT.num_sink_tokens, KEPT.num_window_tokens)
        logprobs = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
        drawn = torch.tensor(chunk.token_ids)
        assert math.isclose(chunk.cumulative_logprob or 0, float(logprobs.gather(1, drawn[:, None]).sum()), abs_tol=1e-3)
    assert len({chunk.token_ids for chunk in told}) == 4
    assert ((await client.stats()).num_preemptions > 0) == (num_blocks == 8)


async def test_bounds_of_what_gives_blocks_back(world: Services) -> None:
    """The pool's own bound; where it does not hold sinks and window at once, that of its blocks."""
    client = await world.serve(cache={"num_blocks": 1 + NUM_HELD, "max_tokens_per_sequence": 100})
    for kept, limit in ((KEPT, 100), (Retention(3, 10), 16), (None, 16)):
        refused = await failure(generate(client, [1, 2], limit - 1, retention=kept))
        assert (refused.reason, refused.metadata) == (
            "NEVER_FITS",
            {"requested": f"{limit + 1}", "limit": f"{limit}"},
        )
        generation = client.generate([1, 2], GenerateOptions(sampling=GREEDY, retention=kept))
        tokens = [token async for chunk in generation for token in chunk.token_ids]
        assert tokens == toy_output([1, 2], limit - 2, kept)


@pytest.mark.parametrize("family", ["mistral_window", "gemma2"])
async def test_models_with_windows_of_their_own_refuse(world: Services, family: str, tmp_path: Path) -> None:
    await world.start_cache()
    model = load_served_model(EngineConfig(model=str(build_model_folder(tmp_path, tiny_model(family))), progress=False))
    client = await world.client(await world.start_engine(model))
    refused = await failure(generate(client, [5, 6], retention=KEPT))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert refused.metadata == {"field": "retention"}
    assert (await generate(client, [5, 6], 2)).reasons == ["length"]
