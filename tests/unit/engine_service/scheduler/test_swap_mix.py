"""Any mix of requests that swap, on the real core with its audit on: every token right, nothing left behind.

A seed replays everything: forks, stops, cancellations, late arrivals, guesses, a host tier too small, transfers that fail.
"""

import random
from collections import Counter

import pytest

from kvkeeper.engine_service.scheduler.headroom import Preemption
from kvkeeper.engine_service.scheduler.plan import Work
from kvkeeper.engine_service.values.request import Retention
from tests.support.slices import todays
from tests.support.worlds.scheduler_world import World, make_request, tiered

NUM_SEEDS = 120


def mixed(dice: random.Random, max_step_items: int = 256) -> World:
    """A world in which transfers fail and the cache is cleared now and then, and its requests."""
    overlap, chunk_size = dice.random() < 0.5, dice.choice([2, 64])
    sizes = (dice.randint(12, 30), dice.randint(1, 4), dice.choice([2, 5, 12, 60]))
    way = dice.choice(list(Preemption))
    ahead = overlap and sizes[0] % 2 == 0
    world = tiered(*sizes, chunk_size=chunk_size, overlap=overlap, ahead=ahead, preemption=way, max_step_items=max_step_items)
    world.scheduler.state.costs.compute.note(10, dice.choice([1, 10]))
    share = dice.choice([0, 0, 0.1])
    world.fails = lambda order_id, kind: dice.random() < share
    how_often = dice.choice([0, 0, 0.1, 0.5])
    world.clears = lambda: dice.random() < how_often
    if guesses := not overlap and chunk_size == 64:
        world.guess = lambda tokens, index: [dice.randrange(3) for _ in range(dice.randrange(4))]
    for _ in range(dice.randint(2, 7)):
        for _ in range(dice.choice([0, 0, 1, 3])):
            world.step()
        length, new = dice.randint(1, 9), dice.randint(1, 12)
        kept = Retention(dice.randint(0, 4), dice.randint(1, 5)) if dice.random() < 0.3 else None
        if length + new > world.limits.get_max_len(kept):
            continue
        prompt, n, priority = [dice.randrange(3) for _ in range(length)], dice.randint(1, 3), dice.choice([0, 0, 1, 1000])
        request = world.submit(make_request(prompt, new, n, priority, look_up=dice.random() < 0.6, retention=kept))
        for sequence in request.sequences:
            if dice.random() < 0.2 and not guesses:
                world.stop_after[sequence] = dice.randint(1, new)
        if dice.random() < 0.25:
            world.cancel(request, after=dice.randint(1, 20))
    return world


def test_any_mix_ends_with_the_right_tokens() -> None:
    happened: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        world = mixed(random.Random(seed))
        step = world.step

        def note(step: object = step, world: World = world) -> Work:
            work: Work = step()  # type: ignore[operator]
            happened["in"] += len(work.changes.swapped_in)
            happened["recomputed"] += len(work.changes.preempted)
            return work

        world.step = note  # type: ignore[method-assign]
        world.run()
        world.check_outputs()
        assert world.cache.manager.queries.stats().num_held_host_blocks == 0, seed
        happened["out"] += world.scheduler.state.num_swapped_out
        happened["failed"] += world.num_failed
        happened["cancelled"] += len(world.cancelled)
        happened["cleared"] += world.num_cleared
        happened["ahead"] += world.num_ahead
        happened["late"] += world.num_late
    names = ("out", "in", "recomputed", "failed", "cancelled", "cleared", "ahead", "late")
    assert min(happened[name] for name in names) > 15, happened


@pytest.mark.parametrize("max_step_items", todays([1, 2, 4], 1))
def test_so_it_does_where_a_step_may_have_few_items(max_step_items: int) -> None:
    num_full_steps = 0
    for seed in range(25):
        world = mixed(random.Random(seed), max_step_items)
        world.run(4000)
        world.check_outputs()
        num_full_steps += world.num_full_steps
    assert num_full_steps > 30
