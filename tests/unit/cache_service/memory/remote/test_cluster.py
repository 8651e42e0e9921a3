"""A pool's store in a cluster of three real servers: what moves, what fails, and what still counts meanwhile."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from redis.exceptions import AskError, MovedError

from kvkeeper.cache_service.core.values.copies import NAME_BYTES, TierOrder, TierResult
from kvkeeper.cache_service.core.values.kv_spec import KvSpec
from kvkeeper.cache_service.memory.remote.cluster_link import ClusterLink
from kvkeeper.cache_service.memory.remote.redis_link import RedisServer
from kvkeeper.cache_service.memory.remote.remote_address import parse_address, read_secret
from kvkeeper.cache_service.memory.remote.remote_store import RemoteStore
from tests.support.remote.redis_cluster import NUM_NODES, RedisCluster
from tests.support.remote.redis_server import PASSWORD
from tests.support.remote.redis_server import RedisServer as Alone

SPEC = KvSpec(b"cluster", "cluster", 0, 0, 0, 0, 16, page_bytes=256)
NUM_BLOCKS = 48
ORDERS = [TierOrder(at, at, at.to_bytes(NAME_BYTES), bytes(NAME_BYTES), bytes(64), at, 0) for at in range(NUM_BLOCKS)]
NAMES = [order.name for order in ORDERS]
DONE, MISSING, FAILED, CANCELLED = TierResult.DONE, TierResult.MISSING, TierResult.FAILED, TierResult.CANCELLED


class World:
    """A store, and the host blocks that it stores from and loads into. Time stands still."""

    def __init__(self, cluster: RedisCluster, timeout: float = 20.0, num_known: int = NUM_NODES) -> None:
        nodes, query = cluster.address.removeprefix("redis://").split("?")
        address = parse_address(f"redis://{','.join(nodes.split(',')[:num_known])}?{query}")
        secret = read_secret(cluster.secret())
        self.cluster, self.now = cluster, 0.0
        self.link = ClusterLink(address, secret, timeout, lambda: self.now)
        self.store = RemoteStore(RedisServer(address, self.link, ttl=3600.0), secret, SPEC)
        self.hosts = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, SPEC.stored_bytes), np.uint8)

    def write(self) -> list[TierResult]:
        return self.store.write(ORDERS, self.hosts)

    def read(self) -> list[TierResult]:
        """The results; what is DONE was compared."""
        loaded = np.zeros_like(self.hosts)
        results = self.store.read(ORDERS, loaded)
        for at, result in enumerate(results):
            assert result is not DONE or np.array_equal(loaded[at], self.hosts[at])
        return results

    def places(self) -> list[int]:
        """The node of each block."""
        era = self.store._settled_era()
        return [self.cluster.place_of(self.store._at(era, name)) for name in NAMES]

    def close(self) -> None:
        self.store.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with closing(RedisCluster(tmp_path_factory.mktemp("cluster"))) as found:
        yield found


@pytest.fixture
def cluster(running: RedisCluster) -> RedisCluster:
    running.clear()
    return running


@pytest.fixture
def world(cluster: RedisCluster) -> Iterator[World]:
    with closing(World(cluster)) as found:
        yield found


def victim_of(world: World) -> int:
    """A node that does not have the era."""
    return next(at for at in range(NUM_NODES) if at != world.cluster.place_of(world.store._era_key))


def test_blocks_lie_on_all_nodes_and_come_back_from_each(world: World) -> None:
    assert world.store.ask(NAMES) == 0
    assert world.read() == [MISSING] * NUM_BLOCKS
    assert world.write() == world.read() == [DONE] * NUM_BLOCKS
    assert [len(keys) for keys in world.cluster.blocks()] == [world.places().count(at) for at in range(NUM_NODES)]
    assert all(world.cluster.blocks())
    assert world.store.ask(NAMES) == NUM_BLOCKS
    assert world.store.ask([*NAMES[:5], b"x" * NAME_BYTES, *NAMES[5:]]) == 5
    with closing(World(world.cluster, num_known=1)) as other:  # asks one node for the others
        assert other.read() == [DONE] * NUM_BLOCKS
        other.store.begin_clearing()
        assert other.store.write_era(2)
    assert world.read() == [MISSING] * NUM_BLOCKS
    assert world.read() == [MISSING] * NUM_BLOCKS


def test_damaged_values_are_deleted_wherever_they_lie(world: World) -> None:
    world.write()
    for node, keys in zip(world.cluster.nodes, world.cluster.blocks(), strict=True):
        node.client().setrange(keys[0], 100, b"\x55\xaa\x55\xaa")
    assert world.read().count(TierResult.DAMAGED) == NUM_NODES
    assert sum(map(len, world.cluster.blocks())) == NUM_BLOCKS - NUM_NODES


def test_blocks_of_slots_that_move_are_followed(world: World) -> None:
    world.write()
    giver, taker = world.cluster.nodes[:2]
    key = giver.blocks()[0]
    world.cluster.move(key, 1, "MIGRATING")
    giver.client().execute_command("MIGRATE", "127.0.0.1", taker.port, key, 0, 5000, "AUTH", PASSWORD)
    with pytest.raises(AskError):
        giver.client().get(key)
    assert world.read() == [DONE] * NUM_BLOCKS
    assert world.store.ask(NAMES) == NUM_BLOCKS
    assert world.write() == [DONE] * NUM_BLOCKS
    world.cluster.move(key, 1)
    with pytest.raises(MovedError):
        giver.client().get(key)
    assert world.store.ask(NAMES) == NUM_BLOCKS
    assert world.write() == world.read() == [DONE] * NUM_BLOCKS
    taker.client().delete(key)
    world.cluster.move(key, 0)


@pytest.mark.parametrize("fault", ["is gone", "hangs"])
def test_a_node_that_fails_costs_its_own_blocks_and_is_asked_again_later(cluster: RedisCluster, fault: str) -> None:
    with closing(World(cluster, timeout=0.3)) as world:
        world.write()
        victim = victim_of(world)
        node, places = cluster.nodes[victim], world.places()
        node.kill() if fault == "is gone" else node.hang()
        try:
            assert world.read() == [FAILED if place == victim else DONE for place in places]
            assert world.read() == [MISSING if place == victim else DONE for place in places], "it rests"
            assert world.write() == [CANCELLED if place == victim else DONE for place in places]
            assert world.store.ask(NAMES) == places.index(victim)
            world.now += 1.0
            assert FAILED in world.read(), "its rest is over"
            world.now += 1.0
            assert FAILED not in world.read(), "this one is longer"
        finally:
            node.start() if fault == "is gone" else node.go_on()
        world.now += 1.0
        cluster.wait()
        assert world.write() == world.read() == [DONE] * NUM_BLOCKS
        assert FAILED not in world.read()


def test_a_node_that_stands_in_for_another_is_found(world: World) -> None:
    world.write()
    victim = victim_of(world)
    key, taker = world.cluster.blocks()[victim][0], (victim + 1) % NUM_NODES
    world.cluster.nodes[victim].kill()
    try:
        world.cluster.move(key, taker)
        world.read()  # one node fails
        assert world.write().count(DONE) == NUM_BLOCKS - world.places().count(victim) + 1
    finally:
        world.cluster.nodes[victim].start()
    world.cluster.wait()
    world.cluster.nodes[taker].client().delete(key)
    world.cluster.move(key, victim)


def test_a_cluster_without_the_node_of_the_era_is_no_cluster(world: World) -> None:
    world.write()
    node = world.cluster.nodes[world.cluster.place_of(world.store._era_key)]
    node.kill()
    assert world.read() == [FAILED] * NUM_BLOCKS
    assert world.store.ask(NAMES) is None
    node.start()
    world.cluster.wait()
    world.now += 100.0
    world.read()  # the era was lost with the node's memory
    assert world.write() == world.read() == [DONE] * NUM_BLOCKS


def test_a_cluster_that_goes_back_to_an_era_that_was_cleared_gets_a_new_one(world: World) -> None:
    world.write()
    node = world.cluster.nodes[world.cluster.place_of(world.store._era_key)].client()
    before = node.get(world.store._era_key)
    world.store.begin_clearing()
    assert world.store.write_era(2)
    node.set(world.store._era_key, before)  # as a replica that had not heard of it
    assert world.read() == [MISSING] * NUM_BLOCKS
    assert world.read() == [MISSING] * NUM_BLOCKS
    assert node.get(world.store._era_key) != before


def test_a_cluster_that_is_away_at_start_is_used_once_it_is_there(cluster: RedisCluster) -> None:
    with closing(World(cluster, num_known=1)) as world:
        cluster.nodes[0].kill()
        assert world.store.ask(NAMES) is None
        cluster.nodes[0].start()
        cluster.wait()
        assert world.write() == world.read() == [DONE] * NUM_BLOCKS


def test_a_server_that_is_no_cluster_gives_no_answer(cluster: RedisCluster, tmp_path: Path) -> None:
    with closing(Alone(tmp_path)) as alone:
        address = parse_address(f"redis://127.0.0.1:{alone.port}?cluster=true")
        secret = read_secret(alone.secret())
        store = RemoteStore(RedisServer(address, ClusterLink(address, secret, 5.0), ttl=1.0), secret, SPEC)
        assert store.ask(NAMES) is None
        store.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("redis://a:1,b:2", "several nodes are those of a cluster"),
        ("redis://a:1/3?cluster=true", "only the database 0"),
        ("mooncake://a:1?cluster=true", "one master"),
        ("redis://a:1,b:0?cluster=true", "without a user or a password"),
        ("redis://a:1,?cluster=true", "without a user or a password"),
        ("redis://a:1?cluster=yes", "without a user or a password"),
    ],
)
def test_addresses_that_mean_nothing_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_address(text)


def test_an_address_names_its_nodes() -> None:
    address = parse_address("rediss://a:1,[::1]:2/0?cluster=true")
    assert address.nodes == (("a", 1), ("::1", 2))
    assert address.is_cluster and address.is_tls and (address.host, address.port) == ("a", 1)
