"""Pins and the time to live where there is a host tier."""

from kvkeeper.cache_service.core.values.types import MatchEnd, SequenceState
from tests.support.tiers.tier_pool import TierPool, cached, push_out
from tests.support.worlds.core_pool import A, int32

PROMPT = range(100, 116)  # four blocks of 4


def matched(pool: TierPool) -> int:
    return pool.manager.queries.explain_match("", int32(PROMPT)).num_matched


def test_blocks_moved_to_the_host_tier_expire_there() -> None:
    pool = TierPool(prefix_ttl=10.0)
    cached(pool, 1, PROMPT)
    pool.pass_time(6.0)
    push_out(pool, 32)
    assert matched(pool) == 16
    pool.pass_time(9.0)
    assert matched(pool) == 16  # its time started anew when it moved
    pool.pass_time(1.0)
    assert matched(pool) == 0
    stats = pool.manager.queries.stats()
    assert (stats.num_expired_blocks, stats.num_cached_host_blocks, stats.num_free_host_blocks) == (4, 0, 8)
    assert pool.manager.queries.explain_match("", int32(PROMPT)).end is MatchEnd.EXPIRED


def test_a_swapped_sequence_does_not_age() -> None:
    pool = TierPool(prefix_ttl=10.0)
    pool.prefill(1, PROMPT)
    written = pool.fill(1)
    pool.swap_out(1)
    pool.pass_time(100.0)
    reply = pool.step(ins=[1])
    pool.step(done=pool.run(reply))
    assert pool.bytes(1) == written


def test_a_copy_that_expires_in_the_host_tier_leaves_the_block_on_the_device() -> None:
    pool = TierPool(prefix_ttl=10.0)
    pool.prefill(1, PROMPT)
    pool.swap_out(1)
    pool.step(done=pool.run(pool.step(ins=[1])))
    pool.pass_time(20.0)
    assert pool.state_of(1) is SequenceState.RUNNING
    assert matched(pool) == 16


def test_only_blocks_on_the_device_are_pinned() -> None:
    pool = TierPool()
    cached(pool, 1, PROMPT)
    push_out(pool, 24)  # six of eight blocks: the leaves move
    result = pool.manager.prefixes.pin(A, "p", "", int32(PROMPT), 60.0)
    pool.audit()
    assert matched(pool) == 16
    assert result.num_tokens == 8


def test_pins_give_way_to_a_sequence_that_comes_back_alone() -> None:
    pool = TierPool()  # 8 usable blocks
    pool.prefill(1, range(500, 528))
    written = pool.fill(1)
    pool.swap_out(1)
    pool.manager.prefixes.clear()
    cached(pool, 2, PROMPT)
    assert pool.manager.prefixes.pin(A, "p", "", int32(PROMPT), 60.0).num_tokens == 16
    reply = pool.step(ins=[1])
    assert pool.manager.queries.stats().num_pins == 0
    pool.step(done=pool.run(reply))
    assert pool.bytes(1) == written
