"""The remote tier through both services, on a real Redis server and on a real Mooncake master: what one service stored comes
back in another.

The model is the hash toy, whose output depends on every K and V that it reads.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.config import SOURCE
from kvkeeper.common.service.settings import ConfigError
from tests.support.processes.service_pair import BLOCK_SIZE, Services, generate, services, toy_output
from tests.support.remote.mooncake_master import MooncakeMaster
from tests.support.remote.redis_cluster import RedisCluster
from tests.support.remote.redis_server import PASSWORD, RedisServer

PROMPTS = [[place + 1, *range(40, 40 + 5 * BLOCK_SIZE)] for place in range(12)]
NUM_CACHED = 5 * BLOCK_SIZE


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    found = RedisServer(tmp_path)
    yield found
    found.close()


Store = RedisServer | MooncakeMaster


@pytest.fixture(params=[RedisServer, MooncakeMaster])
def either_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    found = request.param(tmp_path)
    yield found
    found.close()


def flags(store: Store, **others: Any) -> dict[str, Any]:
    sizes = {"num_blocks": 17, "num_host_blocks": 33, "num_pools": 1, "remote_admit": "all", "remote_deadline": 10.0}
    return {**sizes, "remote": store.address, "remote_secret": store.secret(), **others}


def own_part(store: Store) -> dict[str, Any]:
    """Of the service that has some of the store's memory, where it is its users'."""
    return {"remote_memory": 64 << 20} if isinstance(store, MooncakeMaster) else {}


async def ask(world: Services) -> int:
    """Asks all prompts, checks each token, and returns the sum of cached tokens."""
    client = await world.client(world.engines[0])
    num_cached = 0
    for prompt in PROMPTS:
        output = await generate(client, prompt)
        assert output.token_ids == [toy_output(prompt, 8)]
        num_cached += output.usage.cached_tokens
    return num_cached


async def stored(world: Services) -> pb.PoolStats:
    """The pool once nothing is on its way to the server."""
    while (pool := await world.pool()).num_queued_remote_blocks:  # each turn is a call to the service
        pass
    return pool


async def fill(world: Services, store: Store, **others: Any) -> pb.PoolStats:
    """Starts both services, and has the prompts stored."""
    await world.start_cache(**flags(store, **own_part(store), **others))
    await world.start_engine()
    assert await ask(world) == 0
    await ask(world)
    return await stored(world)


async def clear(world: Services) -> None:
    engine = world.engines[0].engine
    assert engine.memory is not None
    session = await (await world.cache_client()).open_session(engine.memory.session.pool.spec)
    await session.clear_prefix_cache()


async def test_a_second_service_with_other_pools_hits_what_the_first_has_stored_until_it_is_cleared(
    world: Services, either_store: Store
) -> None:
    pool = await fill(world, either_store)
    assert pool.num_remote_stored_blocks > 20
    assert pool.num_failed_remote_blocks == pool.num_damaged_remote_blocks == 0
    async with services() as other:
        await other.start_cache(**flags(either_store, num_blocks=23, num_host_blocks=41))
        await other.start_engine()
        assert await ask(other) >= NUM_CACHED * len(PROMPTS) // 2
        pool = await other.pool()
        assert pool.num_remote_hit_blocks > 20
        assert pool.num_damaged_remote_blocks == pool.num_late_remote_loads == 0
        await clear(other)
    async with services() as third:
        await third.start_cache(**flags(either_store))
        await third.start_engine()
        assert await ask(third) == 0


async def test_a_service_with_another_key_finds_nothing(world: Services, server: RedisServer) -> None:
    await fill(world, server)
    async with services() as stranger:
        await stranger.start_cache(**flags(server, remote_secret=server.secret("another key of a test")))
        await stranger.start_engine()
        assert await ask(stranger) == 0


async def test_damaged_values_are_computed_again_counted_and_deleted(world: Services, server: RedisServer) -> None:
    await fill(world, server)
    client, keys = server.client(), server.blocks()
    for key in keys:
        client.setrange(key, client.strlen(key) - 3, b"\x55\xaa\x55")
    async with services() as other:
        await other.start_cache(**flags(server))
        await other.start_engine()
        await ask(other)
        assert (await other.pool()).num_damaged_remote_blocks > 5


async def test_a_value_under_another_key_is_not_believed(world: Services, server: RedisServer) -> None:
    await fill(world, server)
    client, keys = server.client(), server.blocks()
    for key, value in zip(keys, [client.get(key) for key in keys[1:] + keys[:1]], strict=True):
        client.set(key, value)
    async with services() as other:
        await other.start_cache(**flags(server))
        await other.start_engine()
        await ask(other)
        assert (await other.pool()).num_damaged_remote_blocks > 5


async def test_a_store_that_dies_costs_hits_and_no_request(world: Services, either_store: Store) -> None:
    await fill(world, either_store)
    either_store.kill()
    for _ in range(3):
        await ask(world)
    pool = await world.pool()
    assert pool.num_remote_rests > 0
    if isinstance(either_store, RedisServer):
        either_store.start()
        while (await world.pool()).num_remote_stored_blocks == pool.num_remote_stored_blocks:
            await ask(world)


async def test_a_server_that_hangs_holds_up_no_request_past_the_deadline(world: Services, server: RedisServer) -> None:
    await fill(world, server, remote_deadline=0.2)
    server.hang()
    for _ in range(2):
        await ask(world)
    pool = await world.pool()
    assert pool.num_late_remote_loads + pool.num_remote_rests > 0
    server.go_on()


async def test_a_full_server_stores_nothing_and_fails_no_request(world: Services, tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    try:
        await fill(world, server)
        pool = await world.pool()
        assert pool.num_failed_remote_blocks + pool.num_remote_rests > 0
    finally:
        server.close()


async def test_a_wrong_password_costs_hits_and_is_nowhere_shown(
    world: Services, server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.start_cache(**flags(server, remote_secret=server.secret(password="not the password")))
    await world.start_engine()
    for _ in range(2):
        await ask(world)
    pool = await world.pool()
    assert pool.num_remote_stored_blocks == 0
    assert pool.num_remote_rests > 0
    shown = capsys.readouterr()
    assert "not the password" not in shown.out + shown.err


async def test_a_cluster_is_shared_and_a_node_that_dies_costs_hits_alone(world: Services, tmp_path: Path) -> None:
    with closing(RedisCluster(tmp_path)) as cluster:
        of_cluster = {"remote": cluster.address, "remote_secret": cluster.secret()}
        pool = await fill(world, cluster.nodes[0], **of_cluster)
        assert pool.num_remote_stored_blocks > 20
        assert pool.num_failed_remote_blocks == pool.num_damaged_remote_blocks == 0
        assert all(cluster.blocks())
        async with services() as other:
            await other.start_cache(**flags(cluster.nodes[0], **of_cluster))
            await other.start_engine()
            assert await ask(other) >= NUM_CACHED * len(PROMPTS) // 2
            cluster.nodes[1].kill()
            for _ in range(2):
                await ask(other)
            assert (await other.pool()).num_damaged_remote_blocks == 0


async def test_after_a_clearing_the_server_is_used_again(world: Services, server: RedisServer) -> None:
    await fill(world, server)
    await clear(world)
    await ask(world)
    await stored(world)
    assert len(server.blocks()) > 0


def test_an_address_with_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        SOURCE.load(["--remote", f"redis://me:{PASSWORD}@here:6379/0"], {})
    assert PASSWORD not in str(refused.value)
