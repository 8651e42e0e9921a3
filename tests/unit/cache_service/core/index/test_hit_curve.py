"""HitCurve: what pools of other sizes would hit, against a replay of each of them."""

import random

import numpy as np
import pytest

from kvkeeper.cache_service.core.index.hit_curve import MOST_SAMPLED, SIZES, HitCurve, hit_rates
from kvkeeper.cache_service.core.index.reach import Reach
from kvkeeper.cache_service.core.values.clock import Clock
from kvkeeper.cache_service.core.values.counters import Counters
from tests.support.reference.policy_replay import replay_policy
from tests.support.reference.workloads import WORKLOADS, Requests
from tests.support.slices import todays
from tests.support.worlds.core_pool import ALL, CorePool, int32

_TOKEN = 2**31 - 1  # ends each prompt, so that all of its blocks may hit


def rates(requests: Requests, num_blocks: int) -> list[float]:
    """By size, in blocks, as a pool of so many blocks counts them."""
    reach = Reach(1, Clock(), Counters(), num_blocks)
    for request in requests:
        reach.note_prompt(-1, int32([*request, _TOKEN]))
    num_asked = sum(map(len, requests))
    return [point.hit_rate * (num_asked + len(requests)) / num_asked for point in reach.curve()]


def replayed(requests: Requests, num_blocks: int) -> list[float]:
    return [replay_policy(requests, int(size * num_blocks), "lru").hit_rate for size in SIZES]


@pytest.mark.parametrize("kind", todays(list(WORKLOADS), 4))
def test_a_workload_is_within_two_percent_of_its_replay(kind: str) -> None:
    requests = WORKLOADS[kind](1)
    assert rates(requests, 200) == pytest.approx(replayed(requests, 200), abs=1e-9), "all of a small pool's blocks are sampled"
    assert rates(requests, 2_000) == pytest.approx(replayed(requests, 2_000), abs=0.02)


@pytest.mark.parametrize("seed", todays(range(3), 1))
def test_a_large_pool_is_within_two_percent_of_its_replay_by_a_small_sample(seed: int) -> None:
    rng, requests = random.Random(seed), list[list[int]]()
    for number in range(12_000):  # popular documents of all lengths under a few prompts, each with a question of its own
        document = min(int(rng.paretovariate(0.6)), 6_000)
        own = [10**6 + 8 * number + at for at in range(4)]
        requests.append([document % 3, *(100 + 40 * document + at for at in range(4 + document % 17)), *own])
    assert rates(requests, 10_000) == pytest.approx(replayed(requests, 10_000), abs=0.02)


def test_its_memory_is_bounded_whatever_it_is_shown() -> None:
    curve, num_bytes = HitCurve(100_000), []
    for number in range(12):
        hashes = np.random.default_rng(number).integers(0, 2**64, 5 * MOST_SAMPLED, np.uint64)
        found = curve.use(hashes, np.array([len(hashes)]), np.array([True]))
        assert found[-1] == pytest.approx(len(hashes), rel=0.1), "blocks that were never there"
        num_bytes.append(sum(array.nbytes for array in vars(curve).values() if isinstance(array, np.ndarray)))
    assert max(num_bytes) < 500_000


def test_prompts_that_come_together_count_as_one_by_one() -> None:
    requests = WORKLOADS["agents"](2)
    alone, together = (Reach(1, Clock(), Counters(), 100) for _ in range(2))
    for request in requests[:300]:
        for reach in (alone, together):
            reach.note_prompt(-1, int32([*request, _TOKEN]))
        alone.curve()
    assert together.curve() == alone.curve()


def test_what_sequences_make_takes_room_and_may_be_looked_up() -> None:
    reach = Reach(1, Clock(), Counters(), 4)
    reach.note_prompt(-1, int32([1, 2, _TOKEN]))
    reach.note_end(-1, 3, int32([1, 2, 3, 4, 5]))
    reach.note_prompt(-1, int32([1, 2, 3, 4, 5, _TOKEN]))
    by_size = {point.size: point.hit_rate for point in reach.curve()}
    assert by_size[0.5] < by_size[1.0] < by_size[2.0] == by_size[8.0] == pytest.approx(5 / 9)


def test_the_rates_of_nothing_are_nothing() -> None:
    assert hit_rates(np.zeros(len(SIZES) + 1), 0) == [0.0] * len(SIZES)


def test_a_pool_has_the_curve_of_the_last_hour() -> None:
    pool = CorePool(num_blocks=5, block_size=1)
    for number, first in enumerate((10, 20, 10), 1):
        pool.create(number, [first, first + 1, first + 2, 9])
        pool.step(starts=[(number, ALL, ALL)])
        pool.step(commits=[(number, 4, [])], releases=[number])
    curve = dict(pool.manager.state.reach.curve())
    assert curve[1.0] == 0 and curve[2.0] == pytest.approx(3 / 12)
    pool.manager.state.tick(7_200.0)
    assert set(dict(pool.manager.state.reach.curve()).values()) == {0.0}
