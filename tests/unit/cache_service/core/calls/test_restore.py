"""What a new pool takes over of an earlier run: blocks, tenants, quotas, and what is kept back."""

import numpy as np

from kvkeeper.cache_service.core.calls.restore import EARLIER_RUN
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import UNKNOWN_ROOT, BlockId, BlockState
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
    stats = manager.stats()
    assert (stats.num_cached_blocks, stats.num_free_blocks, stats.num_tenants) == (3, 5, 2)
    assert manager.check_invariants() == []
    assert manager.match_prefix("a", int32(A_PROMPT)).tolist() == pool.manager.match_prefix("a", int32(A_PROMPT)).tolist()
    assert len(manager.match_prefix("b", int32(A_PROMPT))) == 0, "another tenant's"


def test_a_row_that_is_dropped_takes_those_below_it_along() -> None:
    memory, pool = earlier_run()
    first = int(pool.manager.match_prefix("a", int32(A_PROMPT))[0])
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
        assert manager.block_state(BlockId(block)) is wanted
    assert manager.check_invariants() == []
    assert manager.state.pool.num_available == 3
    assert manager.end_quarantine(EARLIER_RUN) == 5
    assert manager.check_invariants() == []
    assert manager.state.pool.num_available == 8


def test_what_is_not_believed_counts_as_another_tenants_where_there_was_one() -> None:
    memory, _ = earlier_run()
    manager, _ = memory.restored()
    free = [block for block in range(1, 9) if manager.block_state(BlockId(block)) is BlockState.FREE]
    assert manager.state.allocator.last_roots[free].tolist() == [UNKNOWN_ROOT] * 5
    memory.tenants.remove("b")  # as if it had never been
    alone, _ = memory.restored()
    assert set(alone.state.allocator.last_roots[1:].tolist()) == {alone.state.index.find_root("a")}


def test_quotas_of_tenants_count_what_came_back() -> None:
    memory, _ = earlier_run()
    config = PoolConfig(9, 4, watermark=0.0, tenant_quotas=(("a", 0.125),), prefix_ttl=60.0)
    manager = PoolManager(config)
    manager.restore(memory.kept, may_still_write=False)
    limits = manager.state.pool.limits
    assert limits.counts[:3].tolist() == [0, 2, 1]
    assert limits.over == {manager.state.index.find_root("a")}
    assert manager.check_invariants() == []
    manager.do_due_work()
    assert manager.stats().num_cached_blocks == 2, "above its share, it loses one"
    assert manager.check_invariants() == []


def test_a_pool_that_took_over_goes_on_writing_down() -> None:
    memory, _ = earlier_run()
    manager = PoolManager(CONFIG)
    manager.restore(memory.kept, may_still_write=False)
    manager.clear_prefix_cache()
    write_all(manager)
    assert not memory.checks.any()
    assert memory.tenants == ["a", "b"], "known for good, so that their blocks are cleared"
