"""The memory outlives the cache service: real processes, killed with SIGKILL, on a folder of kept memory.

The model is the hash toy, whose output depends on every K and V that it reads: a block that is believed and holds something
else changes the tokens.
"""

import asyncio
import json
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, CallOptions
from tests.support.processes.fleet import BLOCK_SIZE, Fleet, Service, fleet
from tests.support.processes.service_pair import generate, toy_output, until
from tests.support.worlds.memory_folder import memory_folder

pytestmark = pytest.mark.in_turn

PROMPTS = [[number, *range(10, 35)] for number in range(6)]  # six whole blocks and two tokens, none shared
NUM_WHOLE = 6 * BLOCK_SIZE


@asynccontextmanager
async def kept_fleet(*switches: str, **flags: int) -> AsyncIterator[tuple[Fleet, Path]]:
    """One engine on a cache service whose memory is in the folder. switches, flags: of the cache service."""
    with memory_folder() as folder:
        async with fleet(1, {"memory_dir": folder, "num_blocks": 128} | flags, cache_switches=switches) as services:
            yield services, folder


def event_of(service: Service, name: str) -> dict[str, Any]:
    (found,) = [event for line in service.lines if (event := json.loads(line))["event"] == name]
    return found


async def ask_all(services: Fleet, *, one_by_one: bool = False) -> list[int]:
    """Asks all prompts, at once by default, checks the tokens, and returns how many tokens of each were cached."""
    async with AsyncEngineClient(services.engine_addresses[0], CallOptions(retry_s=0)) as client:
        if one_by_one:
            outputs = [await generate(client, prompt) for prompt in PROMPTS]
        else:
            outputs = await asyncio.gather(*(generate(client, prompt) for prompt in PROMPTS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == [toy_output(prompt, 8)]
    return [output.usage.cached_tokens for output in outputs]


async def at_rest(services: Fleet) -> pb.PoolStats:
    """The pool once nothing runs. What its counts tell is written down."""
    async with AsyncCacheClient(services.cache_address) as cache:

        async def idle() -> pb.PoolStats | None:
            (pool,) = (await cache.stats()).pools
            busy = pool.num_running_sequences or pool.num_fenced_blocks or pool.num_quarantined_blocks
            return None if busy else pool

        pool = await until(idle)
        assert list((await cache.check_invariants()).violations) == []
        return pool


async def test_a_cache_service_that_is_killed_again_and_again_finds_what_was_cached() -> None:
    async with kept_fleet() as (services, _):
        assert await ask_all(services) == [0] * len(PROMPTS)
        for kill in range(3):
            num_cached = num_lasting(await at_rest(services))
            await services.cache.kill()
            await services.start_cache()
            restored = event_of(services.cache, "pool_restored")
            assert (restored["num_blocks"], restored["num_dropped_blocks"]) == (num_cached, 0)
            await services.engines[0].until("session_opened", kill + 2)
            assert await ask_all(services) == [NUM_WHOLE] * len(PROMPTS)


async def test_both_services_are_killed_at_once_and_the_same_prompts_hit() -> None:
    async with kept_fleet() as (services, _):
        await ask_all(services)
        num_cached = num_lasting(await at_rest(services))
        await asyncio.gather(services.cache.kill(), services.engines[0].kill())
        await services.start_cache()
        restored = event_of(services.cache, "pool_restored")
        assert (restored["num_blocks"], restored["num_quarantined_blocks"]) == (num_cached, 0), "nothing maps the memory"
        await services.start_engine(0)
        assert await ask_all(services) == [NUM_WHOLE] * len(PROMPTS)


async def restart_under_streams(services: Fleet, restart: Callable[[], Awaitable[None]]) -> None:
    """Restarts the cache service while all prompts are answered, and checks their tokens and that they hit after it."""
    async with AsyncEngineClient(services.engine_addresses[0], CallOptions(retry_s=0)) as client:
        streams = [asyncio.create_task(generate(client, prompt, 60)) for prompt in PROMPTS]
        async with AsyncCacheClient(services.cache_address) as cache:

            async def has_cached() -> bool:
                pools = (await cache.stats()).pools
                return bool(pools) and pools[0].num_indexed_blocks >= 3 * len(PROMPTS)

            await until(has_cached)
        assert not any(stream.done() for stream in streams), "the restart comes while they run"
        await restart()
        assert event_of(services.cache, "pool_restored")["num_blocks"] >= 3 * len(PROMPTS)
        outputs = await asyncio.gather(*streams)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == [toy_output(prompt, 60)]


async def test_a_stream_goes_on_over_a_kill_with_the_right_tokens() -> None:
    async with kept_fleet() as (services, _):

        async def restart() -> None:
            await services.cache.kill()
            await services.start_cache()

        await restart_under_streams(services, restart)
        async with AsyncCacheClient(services.cache_address) as cache:
            assert (await cache.stats()).pools[0].num_hit_tokens >= 3 * BLOCK_SIZE, "they found their own blocks"


async def test_a_service_takes_over_from_the_one_that_runs() -> None:
    """Its address, its memory and its engines, which notice a short pause."""
    async with kept_fleet("--keep") as (services, _):
        before = services.cache
        await restart_under_streams(services, partial(services.start_cache, "--take-over"))
        assert await before.end() == 0
        await services.start_cache("--take-over")
        assert event_of(services.cache, "pool_restored")["num_dropped_blocks"] == 0


async def test_a_service_that_would_remove_its_memory_is_not_asked_to_stop() -> None:
    async with kept_fleet() as (services, _):
        await ask_all(services)
        other = await services.spawn_cache("--take-over")
        assert await other.end() == 1
        assert "kvkeeper cache: --take-over: the service that has the folder runs without --keep" in other.tail
        assert await ask_all(services) == [NUM_WHOLE] * len(PROMPTS)


async def test_where_no_service_runs_there_is_nothing_to_take_over() -> None:
    async with kept_fleet("--keep") as (services, _):
        await ask_all(services)
        num_cached = num_lasting(await at_rest(services))
        await services.cache.kill()
        await services.start_cache("--take-over")
        assert event_of(services.cache, "nothing_to_take_over")
        assert event_of(services.cache, "pool_restored")["num_blocks"] == num_cached


async def test_what_an_engine_may_still_write_is_kept_back_until_it_is_gone() -> None:
    """The engine stands still over the restart, with its memory mapped; no sequence gets its blocks till it is killed."""
    async with kept_fleet() as (services, _):
        await ask_all(services)
        num_cached = num_lasting(await at_rest(services))
        await services.engines[0].stop()
        await services.cache.kill()
        await services.start_cache()
        restored = event_of(services.cache, "pool_restored")
        assert (restored["num_blocks"], restored["num_quarantined_blocks"]) == (num_cached, 127 - num_cached)
        async with AsyncCacheClient(services.cache_address) as cache:
            (pool,) = (await cache.stats()).pools
            assert (pool.num_free_blocks, pool.num_quarantined_blocks) == (0, 127 - num_cached)
        await services.engines[0].kill()
        await services.cache.until("quarantine_ended")
        assert (await at_rest(services)).num_free_blocks == 127 - num_cached


@pytest.mark.parametrize("keep", [False, True])
async def test_a_clean_stop_leaves_memory_only_where_it_is_to_be_kept(keep: bool) -> None:
    """Without a quarantine in between: the next service finds all of it, or nothing."""
    with memory_folder() as folder:
        for run in range(2):
            flags = ["--keep"] if keep else []
            async with fleet(1, {"memory_dir": folder, "num_blocks": 128}, cache_switches=flags) as services:
                assert await ask_all(services) == [NUM_WHOLE if run and keep else 0] * len(PROMPTS)
                services.engines[0].terminate()
                assert await services.engines[0].end() == 0
                services.cache.terminate()
                assert await services.cache.end() == 0
            assert folder.exists() == keep


# The host tier: a pool that holds two of the prompts, so that most of what is cached was demoted

SMALL: dict[str, int] = {"num_blocks": 20, "num_host_blocks": 128}


async def all_demoted(services: Fleet) -> pb.PoolStats:
    """The pool once nothing runs and all that left the device has arrived in the host tier."""
    async with AsyncCacheClient(services.cache_address) as cache:

        async def arrived() -> pb.PoolStats | None:
            (pool,) = (await cache.stats()).pools
            num_host_blocks = pool.num_free_host_blocks + pool.num_cached_host_blocks
            return pool if num_host_blocks == SMALL["num_host_blocks"] - 1 else None

        await at_rest(services)
        return await until(arrived)


def num_lasting(stats: Any) -> int:
    """Cached blocks that the next run takes over: all but those of partial nodes, which have one each."""
    return int(stats.num_cached_blocks - stats.num_partial_nodes)


def num_restored(services: Fleet) -> tuple[int, int, int]:
    """Blocks of the device and of the host tier that came back, and rows that were dropped."""
    event = event_of(services.cache, "pool_restored")
    return event["num_blocks"], event["num_host_blocks"], event["num_dropped_blocks"]


async def test_prompts_that_were_demoted_hit_after_a_kill() -> None:
    async with kept_fleet(**SMALL) as (services, _):
        await ask_all(services, one_by_one=True)
        for kill in range(3):
            before = await all_demoted(services)
            assert before.num_cached_host_blocks > 20
            await services.cache.kill()
            await services.start_cache()
            assert num_restored(services) == (num_lasting(before), before.num_cached_host_blocks, 0)
            await services.engines[0].until("session_opened", kill + 2)
            assert await ask_all(services, one_by_one=True) == [NUM_WHOLE] * len(PROMPTS)
            assert (await all_demoted(services)).num_promoted_blocks > 20


async def test_both_services_are_killed_while_blocks_move_and_no_token_is_wrong() -> None:
    async with kept_fleet(**SMALL) as (services, _):
        num_hosts = 0
        for _ in range(3):
            async with AsyncEngineClient(services.engine_addresses[0], CallOptions(retry_s=0)) as client:
                streams = [asyncio.create_task(generate(client, prompt)) for prompt in PROMPTS * 2]
                await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.gather(services.cache.kill(), services.engines[0].kill())
                await asyncio.gather(*streams, return_exceptions=True)
            await services.start_cache()
            num_hosts += num_restored(services)[1]
            await services.start_engine(0)
            await ask_all(services, one_by_one=True)
            await all_demoted(services)
        assert num_hosts > 20


async def test_host_blocks_that_an_engine_may_still_fill_are_kept_back_until_it_is_gone() -> None:
    async with kept_fleet(**SMALL) as (services, _):
        await ask_all(services, one_by_one=True)
        before = await all_demoted(services)
        await services.engines[0].stop()
        await services.cache.kill()
        await services.start_cache()
        num_withheld = 127 - before.num_cached_host_blocks
        assert event_of(services.cache, "pool_restored")["num_quarantined_host_blocks"] == num_withheld
        async with AsyncCacheClient(services.cache_address) as cache:
            (pool,) = (await cache.stats()).pools
            assert (pool.num_free_host_blocks, pool.num_cached_host_blocks) == (0, before.num_cached_host_blocks)
        await services.engines[0].kill()
        await services.cache.until("quarantine_ended")
        assert (await at_rest(services)).num_free_host_blocks == num_withheld


async def test_a_take_over_carries_the_host_tier_and_a_clean_stop_without_keep_removes_it() -> None:
    with memory_folder() as folder:
        async with fleet(1, {"memory_dir": folder} | SMALL, cache_switches=["--keep"]) as services:
            await ask_all(services, one_by_one=True)
            before = await all_demoted(services)
            await services.start_cache("--take-over")
            assert num_restored(services) == (num_lasting(before), before.num_cached_host_blocks, 0)
        assert {path.name[:5] for path in folder.iterdir()} == {"host-", "pool-", "lock"}
        async with fleet(1, {"memory_dir": folder} | SMALL) as services:
            assert num_restored(services)[1] == before.num_cached_host_blocks
            assert await ask_all(services, one_by_one=True) == [NUM_WHOLE] * len(PROMPTS)
            for service in (services.engines[0], services.cache):
                service.terminate()
                assert await service.end() == 0
        assert not folder.exists()


async def test_damage_of_the_memory_is_noticed_and_costs_hits_only() -> None:
    """In a block of each tier; the sample is all of them, or one that finds none, and then all tokens would be wrong."""
    async with kept_fleet("--block-digests", **SMALL, verify_blocks=0) as (services, folder):
        await ask_all(services, one_by_one=True)
        before = await all_demoted(services)
        await asyncio.gather(services.cache.kill(), services.engines[0].kill())
        for path in (*folder.glob("pool-*.arena"), *folder.glob("host-*.arena")):
            content = np.memmap(path, np.uint8)
            content[: -mmap.PAGESIZE] ^= 1  # every block; the stamp behind them stays
            content.flush()
        await services.start_cache()
        event = event_of(services.cache, "pool_restored")
        num_kept = num_lasting(before) + before.num_cached_host_blocks
        assert (event["num_verified_blocks"], event["num_damaged_blocks"]) == (num_kept, num_kept)
        assert num_restored(services) == (0, 0, num_kept)
        await services.start_engine(0)
        assert await ask_all(services, one_by_one=True) == [0] * len(PROMPTS)
        before = await all_demoted(services)
        await services.cache.kill()
        await services.start_cache()
        assert num_restored(services) == (num_lasting(before), before.num_cached_host_blocks, 0)
        assert event_of(services.cache, "pool_restored")["num_damaged_blocks"] == 0
