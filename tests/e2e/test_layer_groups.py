"""Models with windows in some layers: the same tokens with groups of layers as without, for fewer blocks."""

import asyncio
from pathlib import Path

import pytest

from kvkeeper.client import Sampling
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import EngineConfig
from tests.e2e.test_disk_tier import stored
from tests.e2e.test_roles import start_pair
from tests.e2e.test_take_over import take_over
from tests.support.models.tiny_models import TinyModel, build_model_folder, random_tokens, tiny_model
from tests.support.processes.service_pair import Output, Services, generate, services
from tests.support.remote.redis_server import RedisServer
from tests.support.slices import todays

WINDOW = 8
HYBRID = TinyModel(
    "hybrid", "Gemma3Text", {"sliding_window": WINDOW, "sliding_window_pattern": 3, "num_hidden_layers": 6, "vocab_size": 512}
)
PROMPTS = [random_tokens(length, seed=length) for length in (3, 17, 40, 61)]
SAMPLED = Sampling(temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"), HYBRID)


@pytest.fixture(scope="module", params=[HYBRID, tiny_model("gemma4_e2b")], ids=lambda kind: kind.name)
def either_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose groups have blocks of one shape, or of several."""
    return build_model_folder(tmp_path_factory.mktemp("model"), request.param)


def model_of(folder: Path, *, groups: bool) -> ServedModel:
    return load_served_model(EngineConfig(model=str(folder), progress=False, groups=groups))


async def outputs(
    world: Services, folder: Path, *, groups: bool, num_blocks: int, num_host_blocks: int = 0, **options: object
) -> list[Output]:
    """Of all prompts, twice and at once: alone, sampled, with continuations, and as beams."""
    model = model_of(folder, groups=groups)
    assert bool(model.groups) == groups
    client = await world.serve(model, **options, cache={"num_blocks": num_blocks, "num_host_blocks": num_host_blocks})
    found = [await generate(client, prompt, 24) for prompt in PROMPTS]
    found += [await generate(client, [*PROMPTS[3], *found[3].token_ids[0][:9], 5], 12)]
    found += [await generate(client, prompt, 24, SAMPLED, n=3) for prompt in PROMPTS[1:]]
    found += await asyncio.gather(*(generate(client, [*prompt, 9], 30) for prompt in PROMPTS * 2))
    pool = await world.wait_idle()
    assert len(pool.pool.spec.groups) == (3 if groups else 0)
    if groups and num_host_blocks:
        assert 0 < pool.num_swap_outs == pool.num_swap_ins
        assert pool.num_promoted_blocks > 0
    return found


CASES = [
    pytest.param(400, {}, id="roomy"),
    pytest.param(120, {"chunk_size": 16}, id="chunks"),
    pytest.param(400, {"speculation": "prompt-look-up"}, id="speculation"),
    pytest.param(90, {"chunk_size": 8, "token_budget": 32}, id="preemptions"),
    pytest.param(40, {"chunk_size": 64}, id="tight"),
    pytest.param(60, {"num_host_blocks": 200, "preemption": "swap"}, id="host-tier"),
]


@pytest.mark.parametrize(("num_blocks", "options"), todays(CASES, 3))
async def test_groups_change_no_token(folder: Path, num_blocks: int, options: dict[str, object]) -> None:
    found = []
    for groups in (False, True):
        async with services() as world:
            found.append(await outputs(world, folder, groups=groups, num_blocks=num_blocks, **options))
    plain, grouped = found
    assert [each.token_ids for each in grouped] == [each.token_ids for each in plain]
    assert grouped[4].usage.cached_tokens > 0
    assert num_blocks > 90 or sum(each.usage.num_preemptions for each in grouped) > 0


async def test_a_sequence_moves_between_engines_with_the_tables_of_all_groups(world: Services, either_folder: Path) -> None:
    model = model_of(either_folder, groups=True)
    await world.start_cache(num_blocks=600)
    helper, decoder, client = await start_pair(world, model)
    outputs = await asyncio.gather(*(generate(client, prompt, 24) for prompt in PROMPTS))
    assert decoder.engine.stats.num_prefill_tokens == 0, "the blocks came along"
    assert helper.engine.stats.num_prefill_tokens == sum(map(len, PROMPTS))
    assert (await world.pool()).num_hand_offs == len(PROMPTS)
    await decoder.stop()
    await helper.stop()
    giver, gate = await world.start_late_engine(len(PROMPTS[3]) + 9, model)
    client = await world.client(giver)
    running = asyncio.create_task(generate(client, PROMPTS[3], 24, skip_look_up=True))
    await gate.reached()
    taker = await take_over(world, giver, gate, model)
    moved = await running
    assert (await world.pool()).num_hand_offs == len(PROMPTS) + 1
    assert taker.engine.stats.num_prefill_tokens < len(PROMPTS[3]), "the blocks came along"
    assert moved.token_ids == outputs[3].token_ids
    alone = await world.start_engine(model.whole or model)
    client = await world.client(alone)
    assert [(await generate(client, prompt, 24)).token_ids for prompt in PROMPTS] == [each.token_ids for each in outputs]


async def test_prompts_that_left_the_host_tier_come_from_the_disk_by_group(
    world: Services, either_folder: Path, tmp_path: Path
) -> None:
    sizes = {"num_blocks": 60, "num_host_blocks": 61, "disk_memory": 16 << 20, "num_pools": 1}
    await world.start_cache(**sizes, disk_path=tmp_path / "disk")
    model = model_of(either_folder, groups=True)
    client = await world.client(await world.start_engine(model))
    prompts = [random_tokens(50, seed=100 + number) for number in range(6)]
    first = [(await generate(client, prompt, 8)).token_ids for prompt in prompts]
    await stored(world)
    for _ in range(2):
        outputs = [await generate(client, prompt, 8) for prompt in prompts]
        assert [output.token_ids for output in outputs] == first
        await stored(world)
    pool = await world.pool()
    assert len(pool.pool.spec.groups) == len(model.groups) > 1
    assert pool.num_disk_hit_blocks > 10
    assert sum(output.usage.cached_tokens for output in outputs) > 100


async def test_a_second_service_finds_in_the_server_what_each_group_of_the_first_has_stored(
    world: Services, either_folder: Path, tmp_path: Path
) -> None:
    server = RedisServer(tmp_path)
    sizes = {"num_blocks": 60, "num_host_blocks": 61, "num_pools": 1, "remote_admit": "all", "remote_deadline": 10.0}
    flags = {**sizes, "remote": server.address, "remote_secret": server.secret()}
    model, prompts = model_of(either_folder, groups=True), [random_tokens(50, seed=100 + number) for number in range(6)]
    client = await world.serve(model, cache=flags)
    first = [(await generate(client, prompt, 8)).token_ids for prompt in prompts * 2]
    while (pool := await world.pool()).num_queued_remote_blocks:  # each turn is a call to the service
        pass
    assert pool.num_remote_stored_blocks > 20
    async with services() as other:
        client = await other.serve(model, cache=flags)
        outputs = [await generate(client, prompt, 8) for prompt in prompts]
        assert [output.token_ids for output in outputs] == first[:6] == first[6:]
        pool = await other.pool()
        assert pool.num_remote_hit_blocks > 20
        assert pool.num_damaged_remote_blocks == 0
        assert sum(output.usage.cached_tokens for output in outputs) > 100
    server.close()
