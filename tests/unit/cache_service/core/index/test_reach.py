"""Reach: the best hit rate of the last hour beside the one that there was."""

import random

import pytest

from kvkeeper.cache_service.core.index.reach import Reach
from kvkeeper.cache_service.core.values.clock import Clock
from kvkeeper.cache_service.core.values.counters import Counters
from tests.support.worlds.core_pool import ALL, CorePool, int32


class World:
    def __init__(self, block_size: int = 4, num_blocks: int = 100) -> None:
        self.clock, self.counters, self.size = Clock(), Counters(), block_size
        self.reach = Reach(block_size, self.clock, self.counters, num_blocks)

    def ask(self, *tokens: int, root: int = -1) -> None:
        self.reach.note_prompt(root, int32([*tokens, 99]))  # a token to compute

    @property
    def rate(self) -> float:
        return self.reach.stats().reachable_hit_rate


def test_nothing_was_reachable_before_a_prompt_came() -> None:
    assert World().reach.stats() == (0.0, 0.0, 0)


def test_a_prompt_that_comes_again_was_reachable_and_a_new_one_was_not() -> None:
    world = World()
    world.ask(*range(8))
    assert world.rate == 0.0
    world.ask(*range(8))
    assert world.rate == pytest.approx(8 / 18, abs=0.001)
    assert world.reach.stats().num_recent_distinct_blocks == 2
    world.ask(*range(4), 70, 71, 72, 73)
    assert world.rate == pytest.approx(12 / 27, abs=0.001)


def test_a_block_is_its_whole_prefix_and_its_tenant() -> None:
    world = World()
    world.ask(*range(8))
    world.ask(50, 51, 52, 53, *range(4, 8))
    world.ask(*range(8), root=-2)
    world.ask(*range(7))  # less than a second block
    assert world.rate == pytest.approx(4 / 35, abs=0.001)


def test_what_a_sequence_made_is_reachable_for_the_next() -> None:
    world = World()
    world.ask(*range(8))
    world.reach.note_end(-1, 9, int32([*range(8), 99, *range(20, 27)]))
    world.ask(*range(8), 99, *range(20, 27))
    assert world.rate == pytest.approx(16 / 26, abs=0.001)


def test_an_hour_slides_and_both_rates_are_of_it() -> None:
    world = World()
    world.ask(*range(8))
    world.counters.num_look_up_tokens, world.counters.num_hit_tokens = 9, 0
    world.clock.now = 3_000.0
    world.ask(*range(8))
    world.counters.num_look_up_tokens, world.counters.num_hit_tokens = 18, 8
    assert world.reach.stats()[:2] == (pytest.approx(8 / 18), pytest.approx(8 / 18, abs=0.001))
    world.clock.now = 3_700.0
    assert world.reach.stats()[:2] == (pytest.approx(8 / 9), 0.0)
    world.clock.now = 9_000.0
    assert world.reach.stats() == (0.0, 0.0, 0)


def test_the_estimate_of_many_prompts_is_within_two_percent_of_an_infinite_cache() -> None:
    world, rng = World(16), random.Random(1)
    seen: set[tuple[int, ...]] = set()
    num_hits = num_tokens = 0
    for _ in range(400):
        path = tuple(rng.randrange(4 + 40 * depth) for depth in range(rng.randrange(1, 12)))
        world.ask(*(token for block in path for token in [block] * 16))
        prefixes = {path[: at + 1] for at in range(len(path))}
        num_hits += 16 * len(prefixes & seen)
        num_tokens += 16 * len(path) + 1
        seen |= prefixes
    assert world.rate == pytest.approx(num_hits / num_tokens, abs=0.02)
    assert world.reach.stats().num_recent_distinct_blocks == pytest.approx(len(seen), rel=0.03)


def test_a_pool_counts_what_it_is_asked_and_what_its_sequences_make() -> None:
    pool = CorePool(num_blocks=9)
    pool.prefill(1, list(range(8)))
    pool.step(reserves=[(1, 12, 12)])
    pool.step(commits=[(1, 12, [20, 21, 22, 23])])
    pool.release(1)
    pool.create(2, [*range(8), 20, 21, 22, 23, 7])
    pool.step(starts=[(2, ALL, ALL)])
    stats = pool.manager.queries.stats()
    assert stats.recent_hit_rate == stats.hit_rate == 12 / 21
    assert stats.reachable_hit_rate == pytest.approx(12 / 21, abs=0.001)


def test_a_pool_that_shares_nothing_reaches_nothing() -> None:
    pool = CorePool(prefix_caching=False)
    for sequence_id in (1, 2):
        pool.create(sequence_id, list(range(8)))
    assert pool.manager.queries.stats().reachable_hit_rate == 0.0


def test_prompts_that_come_together_count_as_one_by_one() -> None:
    rng = random.Random(3)
    together, alone = World(), World()
    for _ in range(200):  # more than are hashed at once, of none to ten blocks
        tokens, root = [rng.randrange(2) for _ in range(rng.randrange(44))], -rng.randrange(1, 4)
        for world in (together, alone):
            world.reach.note_end(root, len(tokens) // 2 + 1, int32(tokens))
            world.ask(*tokens, root=root)
            world.clock.now += 2.0  # beyond a slice, too
        assert alone.rate >= 0  # asked each time, which hashes what was noted
    assert together.reach.stats() == alone.reach.stats()
    assert 0 < together.rate < 1


def test_a_prompt_without_a_whole_block_is_counted_alone() -> None:
    world = World()
    world.ask(1)
    assert world.rate == 0.0
    assert world.reach.stats().num_recent_distinct_blocks == 0
