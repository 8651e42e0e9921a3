"""The disk tier through both services: what neither pool nor host tier has room for comes back from a disk, token for token.

The model is the hash toy, whose output depends on every K and V that it reads.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.memory.disk.slab import Slab
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, CallOptions
from tests.support.processes.fleet import fleet
from tests.support.processes.service_pair import BLOCK_SIZE, Services, generate, toy_output

pytestmark = pytest.mark.in_turn

PROMPTS = [[place + 1, *range(40, 40 + 5 * BLOCK_SIZE)] for place in range(12)]
NUM_CACHED = 5 * BLOCK_SIZE
SIZES: dict[str, Any] = {"num_blocks": 17, "num_host_blocks": 33, "disk_memory": 4 << 20, "num_pools": 1}


async def ask(services: Services, *, num_turns: int = 1) -> list[int]:
    """Asks all prompts again and again, checks each token, and returns the cached tokens of the last turn."""
    client = await services.client(services.engines[0])
    cached: list[int] = []
    for _ in range(num_turns):
        cached = []
        for prompt in PROMPTS:
            output = await generate(client, prompt)
            assert output.token_ids == [toy_output(prompt, 8)]
            cached.append(output.usage.cached_tokens)
    return cached


async def stored(services: Services) -> pb.PoolStats:
    """The pool once nothing is on its way to the disk."""

    async def at_rest() -> pb.PoolStats | None:
        pool = await services.pool()
        return pool if not pool.num_busy_disk_blocks and not pool.num_queued_disk_blocks else None

    while (pool := await at_rest()) is None:  # each turn is a call to the service
        pass
    return pool


async def test_prompts_that_left_the_host_tier_come_from_the_disk(world: Services, tmp_path: Path) -> None:
    await world.start_cache(**SIZES, disk_path=tmp_path / "disk")
    await world.start_engine()
    assert await ask(world, num_turns=1) == [0] * len(PROMPTS)
    await stored(world)
    assert sum(await ask(world, num_turns=2)) >= NUM_CACHED * len(PROMPTS) * 3 // 4
    pool = await stored(world)
    assert pool.num_disk_hit_blocks > 10
    assert pool.num_disk_stored_blocks > 10
    assert pool.num_damaged_disk_blocks == pool.num_failed_disk_blocks == pool.num_late_disk_loads == 0
    assert pool.disk_read_rate_bytes > 0
    assert pool.disk_write_rate_bytes > 0
    idle = await world.wait_idle()
    assert (idle.num_transfer_blocks, idle.num_busy_host_blocks, idle.num_loading_sequences) == (0, 0, 0)


async def test_without_a_disk_the_same_prompts_miss(world: Services) -> None:
    await world.start_cache(**{**SIZES, "disk_memory": 0})
    await world.start_engine()
    assert sum(await ask(world, num_turns=3)) < NUM_CACHED * len(PROMPTS) // 4


async def test_a_crowd_changes_no_token(world: Services, tmp_path: Path) -> None:
    await world.start_cache(**SIZES, disk_path=tmp_path / "disk")
    clients = [await world.client(await world.start_engine()) for _ in range(2)]
    for _ in range(3):
        order = list(enumerate(PROMPTS * 2))
        outputs = await asyncio.gather(*(generate(clients[place % 2], prompt) for place, prompt in order))
        assert [output.token_ids[0] for output in outputs] == [toy_output(prompt, 8) for _, prompt in order]
        await stored(world)
    assert (await world.pool()).num_disk_hit_blocks > 0


async def test_damaged_slots_are_computed_again_and_counted(world: Services, tmp_path: Path) -> None:
    await world.start_cache(**SIZES, disk_path=tmp_path / "disk")
    await world.start_engine()
    await ask(world)
    await stored(world)
    (path,) = (tmp_path / "disk").glob("slab-*.kv")
    with path.open("r+b") as file:  # every slot, as a disk that lies would
        file.write(os.urandom(path.stat().st_size))
    await ask(world)
    assert (await stored(world)).num_damaged_disk_blocks > 5


async def test_a_disk_that_fails_costs_hits_and_is_left_alone(
    world: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.start_cache(**SIZES, disk_path=tmp_path / "disk")
    await world.start_engine()
    await ask(world)
    await stored(world)

    def fails(*_: object) -> None:
        raise OSError(5, "a test")

    monkeypatch.setattr(Slab, "_read_run", fails)
    await ask(world, num_turns=2)
    pool = await world.pool()
    assert pool.num_failed_disk_blocks > 0
    assert pool.num_disk_rests > 0


async def test_a_clearing_clears_the_disk(world: Services, tmp_path: Path) -> None:
    await world.start_cache(**SIZES, disk_path=tmp_path / "disk")
    engine = (await world.start_engine()).engine
    await ask(world)
    assert (await stored(world)).num_cached_disk_blocks > 0
    assert engine.memory is not None
    session = await (await world.cache_client()).open_session(engine.memory.session.pool.spec)
    await session.clear_prefix_cache()
    assert (await stored(world)).num_cached_disk_blocks == 0
    assert await ask(world) == [0] * len(PROMPTS)


async def test_after_everything_was_killed_the_next_service_serves_what_the_disk_has(tmp_path: Path) -> None:
    flags = {**SIZES, "disk_path": tmp_path / "disk"}
    async with fleet(1, flags) as services:
        for turn in range(2):
            async with AsyncCacheClient(services.cache_address) as cache:
                async with AsyncEngineClient(services.engine_addresses[0], CallOptions(retry_s=0)) as client:
                    outputs = [await generate(client, prompt) for prompt in PROMPTS]
                assert [output.token_ids for output in outputs] == [[toy_output(prompt, 8)] for prompt in PROMPTS]
                (pool,) = (await cache.stats()).pools
                while pool.num_queued_disk_blocks or pool.num_busy_disk_blocks:
                    (pool,) = (await cache.stats()).pools
            if turn:
                break
            await services.cache.kill()
            await services.engines[0].kill()
            await services.start_cache()
            await services.start_engine(0)
        assert sum(output.usage.cached_tokens for output in outputs) > 0
        assert pool.num_disk_hit_blocks > 10
        assert pool.num_damaged_disk_blocks == 0
