"""Requests with sink and window on the real core: blocks come back, nothing that is to be read is missing, and all of it ends.

The world reads every sequence through its tables before it computes: sinks and window must be there, at their places, and
computed by queries that saw what they see (tests/support/worlds/scheduler_world.py).
"""

import pytest

from kvkeeper.engine_service.scheduler.headroom import Preemption
from kvkeeper.engine_service.scheduler.limits import Limits
from kvkeeper.engine_service.values.request import Retention
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import World, make_request, tiered

KEPT = [(0, 1), (0, 4), (1, 1), (3, 2), (4, 3), (4, 4), (5, 8), (9, 1)]


def core_world(num_blocks: int, block_size: int = 4, **options: object) -> World:
    return World(num_blocks, block_size, make_cache=CoreCache, **options)  # type: ignore[arg-type]


def smallest(retention: Retention, block_size: int = 4) -> int:
    """Blocks of a pool, the null block included, that just holds what such a sequence keeps."""
    return retention.num_held_blocks(block_size) + 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("sink", "window"), KEPT)
def test_ten_times_the_pool_is_generated_in_it(sink: int, window: int, overlap: bool) -> None:
    kept = Retention(sink, window)
    world = core_world(smallest(kept), overlap=overlap)
    num_new = 10 * world.num_usable_blocks * 4
    world.submit(make_request([1, 2, 0], num_new, retention=kept))
    world.run(5 * num_new)
    world.check_outputs()
    assert max(world.computed.values()) == 1, "nothing twice"
    stats = world.cache.manager.queries.stats()
    assert stats.num_retention_dropped_blocks == len(kept.holes(3 + num_new - 1, 4))
    assert stats.peak_used_blocks <= world.num_usable_blocks


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 64])
def test_a_prompt_longer_than_the_pool_is_computed_in_what_it_keeps(chunk_size: int, overlap: bool) -> None:
    kept = Retention(5, 6)
    world = core_world(smallest(kept), chunk_size=chunk_size, overlap=overlap)
    prompt = [place % 3 for place in range(15 * smallest(kept))]
    world.submit(make_request(prompt, 30, retention=kept))
    world.run()
    world.check_outputs()
    assert max(world.computed.values()) == 1


def test_a_long_prompt_preempts_none_for_blocks_that_come_back_at_once() -> None:
    """Two that keep everything come to 6 blocks each, and the long one keeps 4."""
    world = core_world(18, overlap=True, chunk_size=64)
    for place in range(2):
        world.submit(make_request([place] * 3, 20))
    world.submit(make_request([place % 3 for place in range(300)], 10, retention=Retention(4, 8)))
    world.run()
    world.check_outputs()
    assert world.scheduler.state.num_preemptions == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_swapped_out_takes_no_more_than_it_holds(overlap: bool) -> None:
    """The host tier has room for what it keeps, not for as many blocks as its table has entries."""
    kept = Retention(2, 5)
    world = tiered(12, 4, num_host_blocks=smallest(kept) + 1, overlap=overlap, preemption=Preemption.SWAP)
    long = world.submit(make_request([0] * 60, 60, retention=kept, look_up=False))
    while long.num_new_tokens < 10:
        world.step()
    world.submit(make_request([1] * 5, 35, priority=1))
    world.run()
    world.check_outputs()
    assert (long.num_preemptions, world.scheduler.state.num_swapped_out) == (1, 1)
    assert max(world.computed.values()) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_preempted_is_computed_again_as_it_was(overlap: bool) -> None:
    kept = Retention(3, 5)
    world = core_world(2 * smallest(kept) - 3, overlap=overlap)
    for place in range(3):
        world.submit(make_request([place] * 9, 40, retention=kept))
    world.run()
    world.check_outputs()
    assert world.scheduler.state.num_preemptions > 0
    assert max(world.computed.values()) > 1


@pytest.mark.parametrize("num_before", [1, 2, 3, 8])
def test_continuations_fork_where_they_can_and_else_start_alone(num_before: int) -> None:
    """The last one finds a slot only when another request has ended; the prompt's own window may have gone by then."""
    kept = Retention(2, 5)
    world = core_world(64, max_sequences=3)
    world.submit(make_request([1], num_before))
    world.submit(make_request([0, 1, 2] * 5, 30, n=3, retention=kept))
    world.run()
    world.check_outputs()
    assert world.cache.manager.queries.stats().num_forks == (2 if num_before < 3 else 1)


def test_limits_of_what_gives_blocks_back() -> None:
    limits = Limits(4, 20, 8, num_usable_blocks=5, max_distance=16, max_retained_len=900)
    assert limits.get_max_len(None) == 20
    assert limits.get_max_len(Retention(4, 9)) == 900
    assert limits.get_max_len(Retention(4, 13)) == 20, "the pool does not hold it: 1 + 3 + 2 blocks"
    assert limits.get_max_len(Retention(0, 17)) == 20, "farther than the model can tell places"
