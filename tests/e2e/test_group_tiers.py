"""Models whose groups of layers are of several kinds, over every tier and a kill: what comes back are the pages of each group.

They are recurrent, alone or wrapped as they are released, or have K and V of several shapes, some of them shared by layers. No
two prompts share a block: a hit is on what that prompt has left behind.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, CallOptions
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import HASH_TOY, EngineConfig
from kvkeeper.engine_service.server import start_server as start_engine
from tests.e2e.test_kept_memory import event_of
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model
from tests.support.models.wrapped import wrap
from tests.support.processes.fleet import BLOCK_SIZE, Fleet, fleet
from tests.support.processes.service_pair import DEADLINE_S, Services, generate, services, until
from tests.support.remote.redis_server import RedisServer
from tests.support.worlds.memory_folder import memory_folder

pytestmark = pytest.mark.in_turn

NUM_WHOLE = 4 * BLOCK_SIZE  # of a prompt, which ends one token behind a checkpoint
# What it is wrapped in, if at all; the groups that its layers come in; and the blocks that a hit of NUM_WHOLE tokens reads: all
# of the group that attends to all tokens, and of each other one a state, or a window of two blocks.
MODELS = {
    "gemma4_e2b": ("", 2, 4 + 2),
    "kimi_linear": ("", 6, 4 + 5),
    "lfm2_moe": ("", 2, 4 + 1),
    "nemotron_3_nano": ("", 4, 4 + 1 + 1 + 1),
    "qwen3_5_27b": ("qwen3_5", 3, 4 + 1 + 1),
}
PROMPTS = [random_tokens(NUM_WHOLE + 1, seed=seed) for seed in range(6)]
NUM_NEW = 5


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def num_read(kind: str) -> int:
    """Blocks that hits of all prompts read."""
    return MODELS[kind][2] * len(PROMPTS)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    wrapper = MODELS[kind][0]
    folder = build_model_folder(tmp_path_factory.mktemp("model"), tiny_model(kind))
    folder = wrap(folder, wrapper=wrapper) if wrapper else folder
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "checkpoint_tokens": 2 * BLOCK_SIZE}
    found = load_served_model(EngineConfig(model=str(folder), progress=False, **options))
    assert (found.text_part_of, len(found.groups)) == MODELS[kind][:2]
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with closing(RedisServer(tmp_path)) as found:
        yield found


@pytest.fixture(scope="module")
def expected(model: ServedModel) -> list[list[int]]:
    """What it says after each prompt, where there is room for all and nothing is found."""

    async def run() -> list[list[int]]:
        async with services() as world:
            client = await world.serve(model, cache={"num_blocks": 400})
            outputs = [await generate(client, prompt, NUM_NEW) for prompt in PROMPTS]
        assert [output.usage.cached_tokens for output in outputs] == [0] * len(PROMPTS)
        return [output.token_ids[0] for output in outputs]

    return asyncio.run(run())


async def ask(client: AsyncEngineClient, expected: list[list[int]]) -> list[int]:
    """Asks all prompts one by one, checks the tokens, and returns how many tokens of each were cached."""
    outputs = [await generate(client, prompt, NUM_NEW) for prompt in PROMPTS]
    assert [output.token_ids for output in outputs] == [[tokens] for tokens in expected]
    return [output.usage.cached_tokens for output in outputs]


@asynccontextmanager
async def engine_on(services: Fleet, model: ServedModel) -> AsyncIterator[AsyncEngineClient]:
    """The client of an engine in this process, on a cache service in another one."""
    address = f"unix:{services.folder}/engine"
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "progress": False, "fronts": 0}
    config = EngineConfig(listen=address, cache=services.cache_address, model=HASH_TOY, **options)
    engine = await start_engine(config, model=model)
    try:
        await engine.wait_ready()
        async with AsyncEngineClient(engine.address, CallOptions(retry_s=DEADLINE_S)) as client:
            yield client
    finally:
        await engine.stop()


def sizes(model: ServedModel) -> dict[str, int]:
    """A pool and a host tier that hold about two prompts each."""
    return {"num_blocks": 9 * len(model.groups), "num_host_blocks": 24, "num_pools": 1}


async def at_rest(address: str) -> pb.PoolStats:
    """The pool once nothing runs and nothing is on its way to a tier, after an audit."""
    async with AsyncCacheClient(address, CallOptions(retry_s=0)) as cache:

        async def resting() -> pb.PoolStats | None:
            (pool,) = (await cache.stats()).pools
            moving = pool.num_busy_host_blocks + pool.num_busy_disk_blocks + pool.num_queued_disk_blocks
            busy = pool.num_running_sequences + pool.num_fenced_blocks + moving + pool.num_queued_remote_blocks
            return None if busy else pool

        pool = await until(resting)
        assert list((await cache.check_invariants()).violations) == []
        return pool


async def test_evicted_prompts_come_back_from_host_tier_and_disk(
    world: Services, model: ServedModel, expected: list[list[int]], num_read: int, tmp_path: Path
) -> None:
    disk = {"disk_path": tmp_path / "disk", "disk_memory": 4 << 20, "disk_deadline": 10.0}
    client = await world.serve(model, cache={**sizes(model), **disk})
    assert await ask(client, expected) == [0] * len(PROMPTS)
    await at_rest(world.cache.address)
    assert await ask(client, expected) == [NUM_WHOLE] * len(PROMPTS)
    pool = await at_rest(world.cache.address)
    assert pool.num_promoted_blocks > num_read // 2
    assert pool.num_disk_hit_blocks > num_read // 2
    assert pool.num_damaged_disk_blocks == pool.num_failed_disk_blocks == pool.num_late_disk_loads == 0


async def test_another_service_finds_them_in_the_remote_store(
    world: Services, model: ServedModel, expected: list[list[int]], num_read: int, server: RedisServer
) -> None:
    remote = {"remote": server.address, "remote_secret": server.secret(), "remote_admit": "all", "remote_deadline": 10.0}
    client = await world.serve(model, cache={**sizes(model), **remote})
    for _ in range(2):  # what never leaves the device is never stored
        await ask(client, expected)
        await at_rest(world.cache.address)
    async with services() as other:
        client = await other.serve(model, cache={**sizes(model), **remote})
        assert await ask(client, expected) == [NUM_WHOLE] * len(PROMPTS)
        pool = await at_rest(other.cache.address)
        assert pool.num_remote_hit_blocks == pool.num_promoted_blocks == num_read
        assert pool.num_damaged_remote_blocks == pool.num_failed_remote_blocks == pool.num_late_remote_loads == 0


async def test_what_a_killed_service_kept_is_restored(model: ServedModel, expected: list[list[int]], num_read: int) -> None:
    """In a pool and in a host tier that has room for what leaves it; the engine lives on."""
    num_groups = len(model.groups)
    with memory_folder() as folder:
        flags = {**sizes(model), "num_host_blocks": 40 * num_groups, "memory_dir": folder}
        async with fleet(0, flags) as killed, engine_on(killed, model) as client:
            assert await ask(client, expected) == [0] * len(PROMPTS)
            before = await at_rest(killed.cache_address)
            await killed.cache.kill()
            await killed.start_cache()
            event = event_of(killed.cache, "pool_restored")
            num_lasting = before.num_cached_blocks - num_groups * before.num_partial_nodes
            assert (event["num_blocks"], event["num_host_blocks"]) == (num_lasting, before.num_cached_host_blocks)
            assert event["num_dropped_blocks"] == 0
            assert await ask(client, expected) == [NUM_WHOLE] * len(PROMPTS)
            assert (await at_rest(killed.cache_address)).num_promoted_blocks > num_read // 2
