"""The remote tier on a real Mooncake master: shared by two services, cleared for both, and no request's trouble when it dies.

The model is the hash toy, whose output depends on every K and V that it reads.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from tests.e2e.test_remote_tier import NUM_CACHED, PROMPTS, ask, stored
from tests.support.processes.service_pair import Services, services
from tests.support.remote.mooncake_master import MooncakeMaster


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    found = MooncakeMaster(tmp_path)
    yield found
    found.close()


def flags(master: MooncakeMaster, **others: Any) -> dict[str, Any]:
    sizes = {"num_blocks": 17, "num_host_blocks": 33, "num_pools": 1, "remote_admit": "all", "remote_deadline": 10.0}
    return {**sizes, "remote": master.address, "remote_secret": master.secret(), "remote_memory": 64 << 20, **others}


async def fill(world: Services, master: MooncakeMaster) -> pb.PoolStats:
    await world.start_cache(**flags(master))
    await world.start_engine()
    assert await ask(world) == 0
    await ask(world)
    return await stored(world)


async def test_a_second_service_hits_what_the_first_has_stored_until_it_is_cleared(
    world: Services, master: MooncakeMaster
) -> None:
    pool = await fill(world, master)
    assert pool.num_remote_stored_blocks > 20
    assert pool.num_failed_remote_blocks == pool.num_damaged_remote_blocks == 0
    async with services() as other:
        await other.start_cache(**flags(master, num_blocks=23, num_host_blocks=41, remote_memory=0))
        await other.start_engine()
        assert await ask(other) >= NUM_CACHED * len(PROMPTS) // 2
        found = await other.pool()
        assert found.num_remote_hit_blocks > 20
        assert found.num_damaged_remote_blocks == found.num_late_remote_loads == 0
        engine = other.engines[0].engine
        assert engine.memory is not None
        session = await (await other.cache_client()).open_session(engine.memory.session.pool.spec)
        await session.clear_prefix_cache()
    async with services() as third:
        await third.start_cache(**flags(master, remote_memory=0))
        await third.start_engine()
        assert await ask(third) == 0


async def test_a_master_that_dies_costs_hits_and_no_request(world: Services, master: MooncakeMaster) -> None:
    await fill(world, master)
    master.kill()
    for _ in range(2):
        await ask(world)
    assert (await world.pool()).num_remote_rests > 0
