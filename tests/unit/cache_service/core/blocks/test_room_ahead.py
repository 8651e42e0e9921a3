"""Blocks are evicted between steps, so that a step of a full pool finds free ones, and never more than a small share."""

from kvkeeper.cache_service.core.blocks.room_ahead import RoomAhead
from tests.support.worlds.core_pool import ALL, CorePool


def full_pool(**config: object) -> CorePool:
    """640 usable blocks of 4 tokens, all but two of them cached; of late a step wanted three."""
    pool = CorePool(num_blocks=641, max_tokens_per_sequence=4000, **config)
    for sequence_id in range(1, 639 // 3):
        pool.prefill(sequence_id, range(sequence_id * 100, sequence_id * 100 + 12))
        pool.step(releases=[sequence_id])
    pool.prefill(1000, range(8))
    pool.step(releases=[1000])
    pool.manager.evictions.evict_count(0)
    return pool


def test_as_many_blocks_as_recent_steps_wanted_are_freed_ahead() -> None:
    pool = full_pool()
    assert pool.manager.queries.stats().num_free_blocks == 2
    assert [pool.manager.evictions.evict_ahead(2), pool.manager.evictions.evict_ahead(2)] == [1, 0]
    stats = pool.manager.queries.stats()
    assert (stats.num_free_blocks, stats.num_evicted_blocks) == (3, 1)
    pool.audit()


def test_at_most_a_small_share_is_freed_ahead() -> None:
    pool = full_pool()
    pool.create(1001, range(50_000, 50_100))
    pool.step(starts=[(1001, ALL, ALL)])
    pool.step(releases=[1001])
    free = pool.manager.queries.stats().num_free_blocks
    assert (free, pool.manager.evictions.evict_ahead(100)) == (25, 0), "25 are free already, and 10 is the most that is freed"
    assert RoomAhead(640).num_blocks == 0


def test_the_wish_fades() -> None:
    room = RoomAhead(64_000)
    room.note_step(100)
    for _ in range(64):
        room.note_step(1)
    assert 30 < room.num_blocks <= 40
    room.note_step(400)
    assert room.num_blocks == 400


def test_nothing_is_freed_ahead_of_orders_to_a_host_tier() -> None:
    pool = full_pool(num_host_blocks=20)
    assert pool.manager.evictions.evict_ahead(100) == 0
