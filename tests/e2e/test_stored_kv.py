"""K and V in fewer bits through both services: prefixes, forks, preemption and swap change no token."""

import asyncio
from pathlib import Path

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import Sampling
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from tests.support.models.tiny_models import TinyModel, build_model_folder, random_tokens
from tests.support.processes.service_pair import BLOCK_SIZE, Output, Services, generate, services

MODEL = TinyModel("stored", "Llama", {"num_hidden_layers": 3, "vocab_size": 512})
PROMPTS = [random_tokens(length, seed=length) for length in (3, 17, 40, 61)]
SAMPLED = Sampling(temperature=1.0, seed=7)
TAIL_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"), MODEL)


def model_of(folder: Path, kv_dtype: str, tail_tokens: int = 0) -> ServedModel:
    return load_served_model(
        EngineConfig(model=str(folder), progress=False, kv_dtype=kv_dtype, kv_tail_tokens=tail_tokens, block_size=BLOCK_SIZE)
    )


async def outputs(
    world: Services, model: ServedModel, num_blocks: int, num_host_blocks: int = 0, **options: object
) -> list[Output]:
    """Of all prompts, some at once, one of them behind another's tokens, one with forks."""
    client = await world.serve(model, **options, cache={"num_blocks": num_blocks, "num_host_blocks": num_host_blocks})
    found = [await generate(client, prompt, 24) for prompt in PROMPTS]
    found += [await generate(client, [*PROMPTS[3], *found[3].token_ids[0][:9], 5], 12)]
    found += [await generate(client, PROMPTS[1], 24, SAMPLED, n=3)]
    found += await asyncio.gather(*(generate(client, [*prompt, 9], 30) for prompt in PROMPTS * 2))
    await world.wait_idle()
    return found


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
async def test_tokens_do_not_depend_on_what_else_runs(folder: Path, kv_dtype: str) -> None:
    model, found = model_of(folder, kv_dtype), []
    for num_blocks, num_host_blocks, options in (
        (400, 0, {"chunk_size": 512}),
        (40, 129, {"chunk_size": 16, "preemption": "swap"}),
    ):
        async with services() as world:
            found.append(await outputs(world, model, num_blocks, num_host_blocks, **options))
            pool = await world.pool()
            assert pool.pool.spec.layout == pb.KV_LAYOUT_SCALED
    roomy, tight = found
    assert [each.token_ids for each in tight] == [each.token_ids for each in roomy]
    assert roomy[4].usage.cached_tokens > 0
    assert sum(each.usage.num_preemptions for each in tight) > 0


@pytest.mark.parametrize(("kv_dtype", "tail_tokens", "num_same"), [("bf16", 0, 10), ("int8", 0, 4), ("int4", 400, 14)])
async def test_tokens_are_those_of_full_precision(folder: Path, kv_dtype: str, tail_tokens: int, num_same: int) -> None:
    """num_same: of the requests. A tail that holds all of a sequence leaves nothing to be read as it is stored."""
    found = []
    for model in (model_of(folder, "auto"), model_of(folder, kv_dtype, tail_tokens)):
        async with services() as world:
            found.append(await outputs(world, model, 400))
    plain, stored = found
    same = [ours.token_ids == theirs.token_ids for ours, theirs in zip(stored, plain, strict=True)]
    assert sum(same) >= num_same, same


@pytest.mark.parametrize("num_blocks", [300, 90])
async def test_a_tail_moves_on_and_is_done_without(folder: Path, num_blocks: int) -> None:
    """Hits behind which no tail is cached, forks and cuts below it; guesses are cut off again."""
    model = model_of(folder, "int8", TAIL_TOKENS)
    assert [group.window for group in model.groups] == [None, *[TAIL_TOKENS - BLOCK_SIZE + 1] * (len(model.groups) - 1)]
    async with services() as world:
        found = await outputs(world, model, num_blocks, speculation="prompt-look-up")
        pool = await world.pool()
        kinds = [group.kind for group in pool.pool.spec.groups]
        assert kinds == [pb.LAYER_GROUP_KIND_FULL, *[pb.LAYER_GROUP_KIND_TAIL] * (len(kinds) - 1)]
    async with services() as world:
        plain = await outputs(world, model_of(folder, "auto"), 400)
    assert found[4].usage.cached_tokens > 0
    same = [ours.token_ids == theirs.token_ids for ours, theirs in zip(found, plain, strict=True)]
    assert sum(same) >= 4, same


async def test_a_swap_takes_the_tail_along(folder: Path) -> None:
    """When the last block of a tail is given back depends on when a step is told, so a tie may fall the other way."""
    model, found = model_of(folder, "int8", TAIL_TOKENS), []
    prompts = [random_tokens(20 + 5 * place, seed=place) for place in range(6)]
    for num_blocks, num_host_blocks in ((400, 0), (70, 301)):
        async with services() as world:
            client = await world.serve(
                model,
                preemption="swap",
                chunk_size=512,
                cache={"num_blocks": num_blocks, "num_host_blocks": num_host_blocks, "prefix_caching": False},
            )
            found.append(await asyncio.gather(*(generate(client, prompt, 30) for prompt in prompts)))
            pool = await world.pool()
            assert pool.pool.spec.groups[1].kind == pb.LAYER_GROUP_KIND_TAIL
            assert (pool.num_swap_ins > 0) == (num_host_blocks > 0)
    roomy, tight = found
    assert sum(one.token_ids == other.token_ids for one, other in zip(tight, roomy, strict=True)) >= 5, found


async def test_a_host_tier_of_few_bits_serves_swaps_and_hits(folder: Path) -> None:
    """What was swapped out in a pool of full precision comes back rounded, and most tokens stay."""
    model, found = model_of(folder, "auto"), []
    for host_kv_dtype in ("auto", "int8"):
        async with services() as world:
            client = await world.serve(
                model, preemption="swap", cache={"num_blocks": 24, "num_host_blocks": 129, "host_kv_dtype": host_kv_dtype}
            )
            turns = [await asyncio.gather(*(generate(client, prompt, 20) for prompt in PROMPTS)) for _ in range(2)]
            found.append([each.token_ids for turn in turns for each in turn])
            pool = await world.pool()
            assert pool.num_failed_transfers == 0
            assert pool.num_promoted_blocks > 0
            if host_kv_dtype == "int8":
                assert pool.pool.host_kv_dtype == pb.KV_DTYPE_INT8
                assert pool.pool.host_block_bytes < 0.35 * pool.pool.block_bytes
    assert sum(one == other for one, other in zip(*found, strict=True)) >= 5, found


def test_what_cannot_be_stored_is_refused_at_load(tmp_path: Path) -> None:
    odd = build_model_folder(tmp_path / "odd", TinyModel("odd", "Llama", {"head_dim": 6}))
    with pytest.raises(UnsupportedModelError, match="multiple of 4 for int4"):
        model_of(odd, "int4")
    library = build_model_folder(tmp_path / "library", TinyModel("library", "GPTNeoX"))
    with pytest.raises(UnsupportedModelError, match="transformers library"):
        model_of(library, "int8")
