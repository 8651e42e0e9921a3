"""Limits of cached blocks: time to live, minimum length of a match, number of blocks, quotas per tenant."""

import pytest

from kvkeeper.cache_service.core.eviction import POLICY_NAMES
from kvkeeper.cache_service.core.tables.prefix_lookup import PrefixLookup
from kvkeeper.cache_service.core.values.errors import OutOfBlocks
from kvkeeper.cache_service.core.values.types import MatchEnd
from tests.support.worlds.core_pool import ALL, A, B, CorePool, int32
from tests.unit.cache_service.core.blocks.test_pins import end_pin

ONE, TWO, THREE = list(range(100, 108)), list(range(200, 208)), list(range(300, 308))  # two blocks of 4 each


def cached(pool: CorePool, *prompts: list[int], tenant: str = "") -> list[int]:
    """How many blocks of each prompt are cached."""
    return [len(pool.matched(prompt, tenant)) for prompt in prompts]


# Time to live


def test_a_block_unused_for_its_time_to_live_is_forgotten() -> None:
    pool = CorePool(prefix_ttl=10.0)
    pool.cache(ONE)
    pool.pass_time(4.0)
    pool.cache(TWO)
    pool.pass_time(5.5)
    assert cached(pool, ONE, TWO) == [2, 2]
    pool.pass_time(0.5)
    assert cached(pool, ONE, TWO) == [0, 2]
    pool.pass_time(4.0)
    assert cached(pool, ONE, TWO) == [0, 0]
    stats = pool.manager.queries.stats()
    assert (stats.num_expired_blocks, stats.num_evicted_blocks, stats.num_free_blocks) == (4, 0, 8)
    assert pool.manager.queries.explain_match("", int32(ONE)).end is MatchEnd.EXPIRED


def test_a_use_restarts_the_time_to_live_and_held_blocks_do_not_age() -> None:
    pool = CorePool(prefix_ttl=10.0)
    pool.cache(ONE)
    pool.pass_time(9.0)
    pool.create(2, [*ONE, 1])
    pool.step(starts=[(2, ALL, ALL)])
    pool.pass_time(100.0)
    assert cached(pool, ONE) == [2]
    pool.release(2)
    pool.pass_time(9.0)
    assert cached(pool, ONE) == [2]
    pool.pass_time(1.0)
    assert cached(pool, ONE) == [0]


def test_a_pinned_block_does_not_expire() -> None:
    pool = CorePool(prefix_ttl=10.0)
    pool.cache(ONE)
    pool.manager.prefixes.pin(A, "p", "", int32(ONE[:4]), 60.0)
    pool.pass_time(30.0)
    assert cached(pool, ONE) == [1]
    pool.pass_time(30.0)
    assert cached(pool, ONE) == [1]  # it came to be cached just now
    pool.pass_time(10.0)
    assert cached(pool, ONE) == [0]


def test_a_clock_that_goes_back_makes_nothing_older() -> None:
    pool = CorePool(prefix_ttl=10.0)
    pool.pass_time(100.0)
    pool.cache(ONE)
    pool.pass_time(-50.0)
    pool.cache(TWO)
    assert cached(pool, ONE, TWO) == [2, 2]
    pool.pass_time(59.0)
    assert cached(pool, ONE, TWO) == [2, 2]
    pool.pass_time(1.0)
    assert cached(pool, ONE, TWO) == [0, 0]


def test_a_tick_forgets_a_slice_leaves_before_parents() -> None:
    pool = CorePool(1300, 1, prefix_ttl=10.0, max_tokens_per_sequence=1300)
    tokens = list(range(1200))
    pool.cache(tokens)
    index = pool.manager.state.index
    left = []
    for _ in iter(lambda: pool.pass_time(10.0), False):
        assert pool.matched(tokens) == [], "what is not forgotten yet is no hit any more"
        left.append((len(index), len(index.match(index.root(""), int32(tokens), 1200))))
    assert left == [(688, 688), (176, 176)]
    assert len(index) == 0


def test_a_block_is_a_hit_until_the_millisecond_at_which_it_has_outlived_its_time() -> None:
    """Whatever asks, and long before the next tick looks for what has outlived its time."""
    pool = CorePool(prefix_ttl=1.0)
    manager = pool.manager
    manager.state.tick(manager.state.now + 0.25)
    pool.cache(ONE)
    born = manager.state.now
    pool.create(7, [*ONE, 1])  # what it hits is looked up ahead
    manager.state.tick(born + 0.999)
    assert cached(pool, ONE) == [2]
    assert manager.queries.explain_match("", int32(ONE)).end is MatchEnd.COMPLETE
    manager.state.tick(born + 1.0)
    assert cached(pool, ONE) == [0]
    told = manager.queries.explain_match("", int32(ONE))
    assert (told.num_matched, told.num_hit, told.end) == (0, 0, MatchEnd.EXPIRED)
    assert manager.prefixes.pin(A, "p", "", int32(ONE), 60.0).num_tokens == 0
    pool.step(starts=[(7, ALL, ALL)])
    assert pool.counters(7)[1] == 0, "it computes all of its prompt"


def test_what_was_looked_up_before_is_looked_up_anew_once_it_has_outlived_its_time() -> None:
    pool = CorePool(prefix_ttl=1.0)
    manager = pool.manager
    pool.cache(ONE)
    pool.create(7, [*ONE, 1])
    lookup = PrefixLookup(manager.state, None)
    _, slot = manager.state.find_sequence(A, 7)
    for seconds, num_hit in ((0.999, 2), (0.001, 0)):
        manager.state.tick(manager.state.now + seconds)
        assert len(lookup.match_sequence(slot, ALL)) == num_hit


def test_a_block_of_the_same_tokens_lives_on_from_its_new_use() -> None:
    pool = CorePool(prefix_ttl=1.0)
    pool.cache(ONE)
    pool.manager.state.tick(pool.manager.state.now + 1.5)
    assert cached(pool, ONE) == [0]
    pool.cache(ONE)  # computed anew, and published where its tokens are known still
    assert cached(pool, ONE) == [2]
    pool.manager.state.tick(pool.manager.state.now + 0.999)
    assert cached(pool, ONE) == [2]
    pool.manager.state.tick(pool.manager.state.now + 0.001)
    assert cached(pool, ONE) == [0]


def test_without_a_time_to_live_no_block_expires_and_no_order_is_kept() -> None:
    pool = CorePool()
    assert not pool.manager.state.pool.limits.is_on
    pool.cache(ONE)
    pool.pass_time(1e9)
    assert cached(pool, ONE) == [2]


# Minimum length


@pytest.mark.parametrize(("least", "hit"), [(0, 4), (3, 4), (4, 4), (5, 0)])
def test_a_match_shorter_than_the_minimum_is_no_hit(least: int, hit: int) -> None:
    pool = CorePool(min_prefix_tokens=least)
    pool.cache(ONE[:4])
    prompt = [*ONE[:4], 9, 9]
    assert cached(pool, prompt) == [1]  # a query is told every cached block
    assert pool.manager.admission.check("", int32(prompt), 0, 0).num_hit_tokens == hit
    pool.create(2, prompt)
    assert pool.step(starts=[(2, ALL, ALL)]).start_hits.tolist() == [hit]
    stats = pool.manager.queries.stats()
    assert (stats.num_hits, stats.num_misses) == ((1, 1) if hit else (0, 2))


def test_the_minimum_applies_to_the_tokens_that_a_start_may_take() -> None:
    pool = CorePool(min_prefix_tokens=8)
    pool.cache(ONE)
    pool.create(2, [*ONE, 1])
    pool.create(3, [*ONE, 2])
    assert pool.step(starts=[(2, ALL, 7), (3, ALL, 8)]).start_hits.tolist() == [0, 8]


# Most blocks


@pytest.mark.parametrize("most", [0, 1, 3, 4, 5])
def test_no_more_blocks_are_cached_than_the_limit(most: int) -> None:
    pool = CorePool(max_cached_blocks=most)
    pool.cache(ONE)
    pool.cache(TWO)
    assert sum(cached(pool, ONE, TWO)) == min(most, 4)
    assert cached(pool, TWO) == [min(most, 2)]  # the least recently used go first
    assert pool.manager.queries.stats().num_cached_blocks == min(most, 4)


def test_held_blocks_do_not_count_and_the_reply_does_not_wait() -> None:
    pool = CorePool(max_cached_blocks=0)
    pool.prefill(1, ONE)
    assert cached(pool, ONE) == [2]
    reply = pool.step(publish=False, releases=[1])
    assert reply.num_evictable == 2
    assert pool.manager.maintenance.publish_pending(1)
    assert pool.manager.queries.stats().num_cached_blocks == 1
    assert not pool.manager.maintenance.publish_pending(1)
    assert pool.manager.queries.stats().num_cached_blocks == 0


# Quotas


def quota_pool(**config: object) -> CorePool:
    """8 usable blocks, 2 of them a tenant's quota."""
    return CorePool(tenant_quota=0.25, **config)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_tenant_above_its_quota_loses_its_own_least_recently_used_blocks(policy: str) -> None:
    pool = quota_pool(eviction_policy=policy)
    pool.cache(THREE, "b")
    pool.cache(ONE, "a")
    pool.cache(TWO, "a", priority=-5)
    assert cached(pool, ONE, TWO, tenant="a") == [0, 2]
    assert cached(pool, THREE, tenant="b") == [2]
    stats = pool.manager.queries.stats()
    assert (stats.num_quota_evictions, stats.num_evicted_blocks) == (2, 2)


def test_a_prefix_is_evicted_in_part_from_its_leaves() -> None:
    pool = quota_pool()
    pool.cache([*ONE, *TWO], "a")
    assert cached(pool, ONE, [*ONE, *TWO], tenant="a") == [2, 2]


def test_a_tenant_above_its_quota_loses_blocks_before_others_even_between_checks() -> None:
    pool = quota_pool()
    pool.cache(THREE, "b")
    pool.prefill(1, [*ONE, *TWO], tenant="a")
    pool.create(2, range(400, 416), tenant="a")
    # 2 blocks of b and 4 of a are cached, 2 are free: the next 4 cost a's blocks, though b's are older.
    reply = pool.step(publish=False, releases=[1], starts=[(2, ALL, 0)])
    assert reply.start_reserved.tolist() == [16]
    assert cached(pool, THREE, tenant="b") == [2]
    assert cached(pool, [*ONE, *TWO], tenant="a") == [2]


def test_a_quota_bounds_cached_blocks_and_not_held_ones() -> None:
    pool = quota_pool()
    pool.prefill(1, list(range(32)), tenant="a")  # the whole pool
    assert cached(pool, list(range(32)), tenant="a") == [8]
    pool.manager.prefixes.pin(A, "p", "a", int32(range(16)), 60.0)
    pool.release(1)
    assert cached(pool, list(range(32)), tenant="a") == [2]  # both pinned, and nothing beside them


def test_pins_count_for_the_quota_of_their_tenant_and_leave_room_for_the_pins_of_others() -> None:
    pool = CorePool(33, tenant_quota=0.125)  # 4 of 32 blocks
    long, other = [*ONE, *TWO, *THREE], list(range(400, 408))  # 6 blocks, and 2 beside them
    pool.prefill(1, long, tenant="a")
    pool.prefill(2, other, tenant="a")
    pool.prefill(3, ONE, tenant="b")
    assert pool.manager.prefixes.pin(A, "p", "a", int32(long), 60.0).num_tokens == 16
    with pytest.raises(OutOfBlocks) as refused:
        pool.manager.prefixes.pin(A, "q", "a", int32(other), 60.0)
    assert refused.value.metadata == {"requested": "2", "available": "0"}
    assert pool.manager.prefixes.pin(A, "r", "a", int32(long), 60.0).num_tokens == 16  # what is pinned takes no more room
    assert pool.manager.prefixes.pin(A, "s", "b", int32(ONE), 60.0).num_tokens == 8
    pool.release(1, 2, 3)
    assert cached(pool, long, other, tenant="a") == [4, 0]  # the quota is full of pinned blocks
    pool.manager.prefixes.unpin(A, "p")
    pool.manager.prefixes.unpin(A, "r")
    pool.audit()
    pool.cache(other, "a")
    assert cached(pool, long, other, tenant="a") == [2, 2]


@pytest.mark.parametrize("end", ["time", "session", "clear"])
def test_a_pin_that_ends_gives_its_share_of_the_quota_back(end: str) -> None:
    pool = CorePool(17, tenant_quota=0.125)  # 2 of 16 blocks
    pool.cache(ONE, "a")
    pool.manager.prefixes.pin(B, "p", "a", int32(ONE), 5.0)
    end_pin(pool, end, ttl=5.0)
    pool.cache(TWO, "a")
    assert cached(pool, TWO, tenant="a") == [2]
    assert pool.manager.prefixes.pin(A, "q", "a", int32(TWO), 60.0).num_tokens == 8


def test_a_tenant_may_have_a_quota_of_its_own() -> None:
    pool = CorePool(tenant_quotas=(("small", 0.125), ("none", 0.0)))
    pool.cache(ONE, "small")
    pool.cache(ONE, "none")
    pool.cache(ONE, "other")
    assert [cached(pool, ONE, tenant=tenant)[0] for tenant in ("small", "none", "other")] == [1, 0, 2]


def test_no_tenant_keeps_another_from_its_quota() -> None:
    """However much one tenant computes, the blocks of the other within its quota stay cached."""
    pool = CorePool(17, tenant_quota=0.25)
    pool.cache(THREE, "b")
    for first in range(1000, 3000, 100):
        pool.cache(list(range(first, first + 32)), "a")
    assert cached(pool, THREE, tenant="b") == [2]


def test_blocks_left_by_an_ended_session_count_for_its_tenant() -> None:
    pool = quota_pool()
    pool.prefill(1, [*ONE, *TWO], tenant="a", session=B)
    pool.manager.sessions.close(B, may_still_write=False)
    pool.audit()
    pool.manager.maintenance.publish_pending()
    pool.audit()
    assert cached(pool, [*ONE, *TWO], tenant="a") == [2]


def test_clearing_and_eviction_on_demand_keep_the_counts_true() -> None:
    pool = quota_pool(prefix_ttl=60.0, max_cached_blocks=3)
    pool.cache(ONE, "a")
    pool.cache(TWO, "b")
    pool.manager.evictions.evict_blocks(6)
    pool.audit()
    pool.manager.prefixes.clear()
    pool.audit()
    pool.cache(ONE, "a")
    assert cached(pool, ONE, tenant="a") == [2]
