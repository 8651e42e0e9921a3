"""Blocks are evicted between steps, so that a step of a full pool finds free ones, and never more than a small share."""

import asyncio

import numpy as np

from kvkeeper.cache_service.core.blocks.room_ahead import RoomAhead
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.types import SequenceId
from kvkeeper.client.steps import StepItems
from tests.support.worlds.core_pool import ALL, CorePool
from tests.support.worlds.foretold_pair import Side


def full_pool(**config: object) -> CorePool:
    """640 usable blocks of 4 tokens, all but two of them cached; of late a step wanted three."""
    pool = CorePool(num_blocks=641, max_tokens_per_sequence=4000, **config)
    for sequence_id in range(1, 639 // 3):
        pool.prefill(sequence_id, range(sequence_id * 100, sequence_id * 100 + 12))
        pool.step(releases=[sequence_id])
    pool.prefill(1000, range(8))
    pool.step(releases=[1000])
    pool.manager.evict_count(0)
    return pool


def test_as_many_blocks_as_recent_steps_wanted_are_freed_ahead() -> None:
    pool = full_pool()
    assert pool.manager.stats().num_free_blocks == 2
    assert [pool.manager.evict_ahead(2), pool.manager.evict_ahead(2)] == [1, 0]
    stats = pool.manager.stats()
    assert (stats.num_free_blocks, stats.num_evicted_blocks) == (3, 1)
    pool.audit()


def test_at_most_a_small_share_is_freed_ahead() -> None:
    pool = full_pool()
    pool.create(1001, range(50_000, 50_100))
    pool.step(starts=[(1001, ALL, ALL)])
    pool.step(releases=[1001])
    free = pool.manager.stats().num_free_blocks
    assert (free, pool.manager.evict_ahead(100)) == (25, 0), "25 are free already, and 10 is the most that is freed"
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
    assert pool.manager.evict_ahead(100) == 0


def test_the_answers_of_a_full_pool_are_told_before_their_requests() -> None:
    async def run() -> list[bool]:
        """Whether the answer to the next step is there, after each step of eight sequences that grow in a full pool."""
        config = PoolConfig(1281, 4, max_tokens_per_sequence=64, eviction_policy="lru")
        side = Side(config, foretells=True)
        live = await side.open()
        step_id = 0

        def step(**columns: list[int]) -> None:
            nonlocal step_id
            step_id += 1
            types = {name: np.int64 if name.endswith("_ids") else np.int32 for name in columns}
            items = StepItems(**{name: np.array(column, types[name]) for name, column in columns.items()})
            side.step(live, items, step_id, step_id - 1)

        def start(sequence_id: int) -> None:
            prompt = np.arange(12, dtype=np.int32) + 100 * sequence_id
            side.pool.manager.create_sequence(live.core.id, SequenceArgs(SequenceId(sequence_id), prompt, 64))
            step(start_ids=[sequence_id], start_max_new=[12], start_max_hit=[0])

        for sequence_id in range(1, 500):  # more than fit
            start(sequence_id)
            step(commit_ids=[sequence_id], commit_lens=[12], commit_num_new=[0], release_ids=[sequence_id])
        ids = list(range(1001, 1009))
        for sequence_id in ids:
            start(sequence_id)
        step(commit_ids=ids, commit_lens=[12] * 8, commit_num_new=[1] * 8, commit_tokens=[1] * 8,
             reserve_ids=ids, reserve_min=[13] * 8, reserve_max=[13] * 8)  # fmt: skip
        is_told = []
        for length in range(13, 60):
            ones, lens = [1] * 8, [length] * 8
            reserved = [length + 1] * 8
            step(commit_ids=ids, commit_lens=lens, commit_num_new=ones, commit_tokens=ones,
                 reserve_ids=ids, reserve_min=reserved, reserve_max=reserved)  # fmt: skip
            is_told.append(live.foretold is not None and live.foretold.answer is not None)
        assert side.pool.manager.stats().num_evicted_blocks > 200
        return is_told

    assert all(asyncio.run(run()))
