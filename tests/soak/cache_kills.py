"""Row 17: the cache service is killed under load, again and again, and no client of an engine loses anything.

Real processes. Each time the service is started again on its address, serves within three seconds of its own start, and every
engine comes back by itself and continues with what it had, waiting or running. Some kills come while the engines are still
opening their sessions, or start their requests again. With kept memory the service takes over what it had cached in the pool
and in its host tier, too, while engines of before may still write.
"""

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, CallOptions
from tests.soak.row import Counts
from tests.support.processes.fleet import Fleet, fleet
from tests.support.processes.fleet_load import Load, load_on
from tests.support.processes.service_pair import until
from tests.support.worlds.memory_folder import memory_folder

SERVING_WITHIN_S = 3.0
_REFUSALS = frozenset({"CACHE_SERVICE_DOWN"})
_WORKERS = {"plain": 3, "resubmitting": 1, "submitting": 2}


async def run(seed: int, num_engines: int, num_kills: int, *, is_kept: bool = False) -> Counts:
    """Counts kills; the fault is a request that was under way in one and ended well after it. Worst: seconds until serving."""
    with memory_folder() if is_kept else nullcontext() as folder:
        return await _run(random.Random(seed), num_engines, num_kills, folder)


async def _run(rng: random.Random, num_engines: int, num_kills: int, memory_dir: Path | None) -> Counts:
    slowest = 0.0
    flags: dict[str, Any] = {"num_blocks": 24 * num_engines}
    if memory_dir:  # with a host tier, so that kills come while blocks move between the tiers
        flags |= {"memory_dir": memory_dir, "num_host_blocks": 24 * num_engines}
    async with fleet(num_engines, flags) as services:
        async with load_on(services, rng, _REFUSALS) as load:
            load.start(**_WORKERS)
            num_opened = [0] * num_engines
            for kill in range(num_kills):
                await _wait(services, load, rng, kill, num_opened)
                num_opened = [engine.events["session_opened"] for engine in services.engines]
                load.note_fault(*range(num_engines))
                await services.cache.kill()
                await services.start_cache()
                slowest = max(slowest, services.cache.ready_after)
                assert slowest <= SERVING_WITHIN_S, f"serving after {slowest:.1f} s"
                assert services.cache.events["pool_restored"] == (memory_dir is not None)
            await load.until_chunks(1, *range(num_engines))
            await load.stop()
        await check_nothing_is_left(services)
    return Counts(num_kills, load.num_survived, slowest)


async def _wait(services: Fleet, load: Load, rng: random.Random, kill: int, num_opened: list[int]) -> None:
    """Until the time of a kill: mostly all engines are running, some have just come back, or not yet."""
    if kill % 2 == 0:
        await load.until_chunks(1, *range(len(services.engines)))
        await load.until_chunks(rng.choice([1, 10, 100, 300]))
    elif kill % 4 == 1:
        number = rng.randrange(len(services.engines))
        await services.engines[number].until("session_opened", num_opened[number] + 1)


async def check_nothing_is_left(services: Fleet) -> None:
    """Each request that was taken has ended well, and the pool is at rest."""
    for address in services.engine_addresses:
        async with AsyncEngineClient(address, CallOptions(retry_s=0)) as client:
            stats = await client.stats()
            assert stats.num_failed_requests == 0, "a request that was taken has failed"
            assert stats.num_running_requests == stats.num_waiting_requests == 0
    async with AsyncCacheClient(services.cache_address) as cache:

        async def pool_at_rest() -> pb.PoolStats | None:
            pool = (await cache.stats()).pools[0]
            return None if pool.num_referenced_blocks or pool.num_fenced_blocks else pool

        pool = await until(pool_at_rest)
        assert list((await cache.check_invariants()).violations) == []
        assert pool.num_running_sequences == pool.num_waiting_sequences == 0
