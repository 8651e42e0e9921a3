"""Engines that share one small pool: every one gets on, and none take turns (docs/inside/reliability.md, promise 11)."""

import pytest

from tests.support.worlds.engine_crowd import CrowdCounts, EngineCrowd
from tests.support.worlds.scheduler_world import make_request


def test_when_the_last_sequences_of_two_engines_want_the_same_block_the_earlier_one_gets_it() -> None:
    crowd = EngineCrowd(seed=0, num_engines=2, num_blocks=4)
    old, young = crowd.worlds
    first = old.submit(make_request([1, 2, 0, 1], 4))
    old.step()
    second = young.submit(make_request([2, 2, 1, 0], 4))
    young.step()
    for _ in range(40):
        for world in crowd.worlds:
            world.step()
    for world in crowd.worlds:
        world.check_outputs()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert (first.start_number, second.start_number) == (1, 2), "giving way did not make it a later arrival"


def test_a_large_request_is_not_starved_by_another_engines_small_ones() -> None:
    crowd = EngineCrowd(seed=0, num_engines=2, num_blocks=6)
    busy, waiting = crowd.worlds
    for _ in range(6):
        busy.submit(make_request([1, 2], 2))
        busy.step()
    large = waiting.submit(make_request([2] * 10, 2))
    for step in range(60):
        busy.submit(make_request([1, step % 3], 2))
        busy.step()
        waiting.step()
        if not waiting.busy:
            break
    assert not waiting.busy
    waiting.check_outputs()
    assert large.num_preemptions == 0


@pytest.mark.each_value
@pytest.mark.parametrize("num_host_blocks", [0, 12])
@pytest.mark.parametrize(("num_engines", "num_blocks"), [(2, 4), (2, 9), (3, 20), (4, 5)])
def test_any_mix_of_requests_ends_without_a_stall(num_engines: int, num_blocks: int, num_host_blocks: int) -> None:
    total = CrowdCounts()
    for seed in range(6):
        watermark = 0.1 * (seed % 3)
        counts = EngineCrowd(seed, num_engines, num_blocks, 2, watermark, num_host_blocks).run(num_requests=20)
        for name, value in vars(counts).items():
            setattr(total, name, getattr(total, name) + value)
    assert (total.num_swapped_out > 20) == (num_host_blocks > 0)
    assert min(total.num_preemptions, total.num_given_back, total.num_refused_starts) > 20, total
