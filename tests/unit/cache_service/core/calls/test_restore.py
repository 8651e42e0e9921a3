"""What a new pool takes over of an earlier run: blocks, tenants, quotas, and what is kept back."""

import numpy as np
import pytest

from kvkeeper.cache_service.core.calls.restore import EARLIER_RUN
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.kept_index import Digest, UInt64Array, Verification
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import UNKNOWN_TENANT, BlockId, BlockState, Int32Array, Tier
from tests.support.worlds.core_pool import ALL, CorePool, int32
from tests.support.worlds.kept_pool import KeptMemory, chains, write_all

CONFIG = PoolConfig(9, 4, watermark=0.0)
A_PROMPT, B_PROMPT = list(range(9)), list(range(100, 105))


def earlier_run(config: PoolConfig = CONFIG) -> tuple[KeptMemory, CorePool]:
    """Tenant "a" has two full blocks cached, tenant "b" one; each has one block half full."""
    memory, pool = KeptMemory(config), CorePool(config.num_blocks, config.block_size)
    pool.manager.restore(memory.kept, may_still_write=False)
    pool.create(1, A_PROMPT, tenant="a")
    pool.create(2, B_PROMPT, tenant="b")
    pool.step(starts=[(1, 9, ALL), (2, 9, ALL)])
    pool.step(commits=[(1, 9, []), (2, 5, [])])
    write_all(pool.manager)
    return memory, pool


def test_the_next_run_has_the_same_cached_prefixes() -> None:
    memory, pool = earlier_run()
    manager, result = memory.restored()
    assert chains(manager) == chains(pool.manager)
    assert (result.num_blocks, result.num_dropped, result.num_quarantined) == (3, 0, 0)
    stats = manager.queries.stats()
    assert (stats.num_cached_blocks, stats.num_free_blocks, stats.num_tenants) == (3, 5, 2)
    assert manager.queries.check_invariants() == []
    matches = [each.queries.match_prefix("a", int32(A_PROMPT)).blocks.tolist() for each in (manager, pool.manager)]
    assert matches[0] == matches[1]
    assert manager.queries.match_prefix("b", int32(A_PROMPT)).num_tokens == 0, "another tenant's"


def test_a_row_that_is_dropped_takes_those_below_it_along() -> None:
    memory, pool = earlier_run()
    first = int(pool.manager.queries.match_prefix("a", int32(A_PROMPT)).blocks[0])
    memory.checks[first] ^= np.uint64(2)
    _, result = memory.restored()
    assert (result.num_blocks, result.num_dropped) == (1, 2)


def test_what_may_still_be_written_is_kept_back_until_it_no_longer_may() -> None:
    memory, pool = earlier_run()
    manager, result = memory.restored(may_still_write=True)
    assert result.num_quarantined == 5
    for block in range(1, 9):
        was_published = pool.manager.state.pool.indexed[block]
        wanted = BlockState.CACHED if was_published else BlockState.QUARANTINED
        assert manager.state.pool.state(BlockId(block)) is wanted
    assert manager.queries.check_invariants() == []
    assert manager.state.pool.num_available == 3
    assert manager.sessions.end_quarantine(EARLIER_RUN) == 5
    assert manager.queries.check_invariants() == []
    assert manager.state.pool.num_available == 8


def test_what_is_not_believed_counts_as_another_tenants_where_there_was_one() -> None:
    memory, _ = earlier_run()
    manager, _ = memory.restored()
    free = [block for block in range(1, 9) if manager.state.pool.state(BlockId(block)) is BlockState.FREE]
    assert manager.state.allocator.last_tenants[free].tolist() == [UNKNOWN_TENANT] * 5
    memory.scopes.remove("b")  # as if it had never been
    alone, _ = memory.restored()
    assert set(alone.state.allocator.last_tenants[1:].tolist()) == {alone.state.index.find_root("a")}


def test_quotas_of_tenants_count_what_came_back() -> None:
    memory, _ = earlier_run()
    config = PoolConfig(9, 4, watermark=0.0, tenant_quotas=(("a", 0.125),), prefix_ttl=60.0)
    manager = PoolManager(config)
    manager.restore(memory.kept, may_still_write=False)
    limits = manager.state.pool.limits
    assert limits.counts[:3].tolist() == [0, 2, 1]
    assert limits.over == {manager.state.index.find_root("a")}
    assert manager.queries.check_invariants() == []
    manager.maintenance.do_due_work()
    assert manager.queries.stats().num_cached_blocks == 2, "above its share, it loses one"
    assert manager.queries.check_invariants() == []


def test_a_pool_that_took_over_goes_on_writing_down() -> None:
    memory, _ = earlier_run()
    manager = PoolManager(CONFIG)
    manager.restore(memory.kept, may_still_write=False)
    manager.prefixes.clear()
    write_all(manager)
    assert not memory.checks.any()
    assert memory.scopes == ["a", "b"], "known for good, so that their blocks are cleared"


# The host tier, and digests

WITH_HOSTS = PoolConfig(9, 4, watermark=0.0, num_host_blocks=9)
PROMPT = list(range(16))  # four whole blocks


def across_tiers() -> tuple[KeptMemory, CorePool]:
    """A chain of four blocks: the first two in both tiers, the third in the host tier alone, the last on the device alone."""
    memory, pool = KeptMemory(WITH_HOSTS), CorePool(9, 4, num_host_blocks=9)
    pool.manager.restore(memory.kept, may_still_write=False)
    index = pool.manager.state.index
    nodes = index.insert_run(index.root("a"), int32(PROMPT), int32([1, 2, 3, 4]))
    index.add_hosts(nodes[:3], int32([5, 6, 7]))
    index.note_filled(int32([5, 6, 7]))
    index.leave_device(int32([3]))
    while pool.manager.record.write(2, digest_of(memory)):
        pass
    return memory, pool


def digest_of(memory: KeptMemory, damaged: tuple[tuple[Tier, int], ...] = ()) -> Digest:
    def digest(tier: Tier, blocks: Int32Array) -> UInt64Array:
        return np.array([100 * tier + block + 1000 * ((tier, block) in damaged) for block in blocks.tolist()], np.uint64)

    return digest


def places_of(manager: PoolManager) -> list[tuple[int, int]]:
    """By depth."""
    return [places for _, places in sorted(chains(manager).items(), key=lambda item: len(item[0][1]))]


def test_a_chain_comes_back_across_the_tiers() -> None:
    memory, _ = across_tiers()
    manager, result = memory.restored()
    assert places_of(manager) == [(1, 5), (2, 6), (0, 7), (4, 0)]
    assert (result.num_blocks, result.num_host_blocks, result.num_dropped) == (3, 3, 0)
    assert manager.queries.check_invariants() == []
    stats = manager.queries.stats()
    assert (stats.num_cached_blocks, stats.num_cached_host_blocks, stats.num_free_host_blocks) == (3, 3, 5)
    assert manager.queries.match_prefix("a", int32(PROMPT)).blocks.tolist() == [1, 2, 0, 4]


def test_host_blocks_that_may_still_be_written_are_kept_back_with_those_of_the_device() -> None:
    memory, _ = across_tiers()
    manager, result = memory.restored(may_still_write=True)
    assert (result.num_quarantined, result.num_quarantined_hosts) == (5, 5)
    assert manager.queries.check_invariants() == []
    assert manager.queries.stats().num_free_host_blocks == 0
    manager.sessions.end_quarantine(EARLIER_RUN)
    assert manager.queries.check_invariants() == []
    assert (manager.queries.stats().num_free_host_blocks, manager.queries.stats().num_free_blocks) == (5, 5)


def test_a_host_row_that_is_dropped_takes_what_only_it_leads_to_along() -> None:
    memory, _ = across_tiers()
    assert memory.hosts is not None
    memory.hosts.checks[7] ^= np.uint64(2)
    manager, result = memory.restored()
    assert places_of(manager) == [(1, 5), (2, 6)]
    assert (result.num_blocks, result.num_host_blocks, result.num_dropped) == (2, 2, 2)


@pytest.mark.parametrize(
    ("damaged", "left"),
    [
        ((), [(1, 5), (2, 6), (0, 7), (4, 0)]),
        (((Tier.DEVICE, 4),), [(1, 5), (2, 6), (0, 7)]),
        (((Tier.HOST, 7),), [(1, 5), (2, 6)]),
        (((Tier.DEVICE, 2),), [(1, 5), (0, 6), (0, 7), (4, 0)]),  # its copy in the other tier is right
        (((Tier.DEVICE, 2), (Tier.HOST, 6)), [(1, 5)]),
        (((Tier.HOST, 5), (Tier.DEVICE, 1)), []),
    ],
)
def test_blocks_that_hold_something_else_are_forgotten_with_what_only_they_lead_to(
    damaged: tuple[tuple[Tier, int], ...], left: list[tuple[int, int]]
) -> None:
    memory, _ = across_tiers()
    manager, result = memory.restored(verification=Verification(digest_of(memory, damaged), 0, 0))
    assert places_of(manager) == left
    assert (result.num_verified, result.num_damaged) == (6, len(damaged))
    assert result.num_dropped == 6 - sum(place > 0 for places in left for place in places)
    assert manager.queries.check_invariants() == []
