"""Beam searches among requests that swap, on the real core with its audit on: a seed replays rooms, priorities and failures."""

import random
from collections import Counter

import pytest

from kvkeeper.engine_service.outputs.beam_search import BeamOptions
from kvkeeper.engine_service.scheduler.headroom import Preemption
from tests.support.slices import todays
from tests.support.worlds.beam_world import BeamWorld
from tests.support.worlds.core_cache import CoreCache
from tests.support.worlds.scheduler_world import make_request

NUM_SEEDS = 100


def mixed(dice: random.Random, max_step_items: int = 256) -> BeamWorld:
    """A world in which transfers fail and the cache is cleared now and then, and its requests."""
    world = BeamWorld(
        dice.randint(10, 26),
        dice.randint(1, 4),
        make_cache=CoreCache,
        max_sequences=dice.choice([4, 8, 64]),
        max_running=dice.choice([4, 6, 32]),
        chunk_size=dice.choice([2, 64]),
        overlap=dice.random() < 0.5,
        num_host_blocks=dice.choice([0, 4, 12, 60]),
        preemption=dice.choice(list(Preemption)),
        max_step_items=max_step_items,
    )
    share = dice.choice([0, 0, 0.1])
    world.fails = lambda order_id, kind: dice.random() < share
    how_often = dice.choice([0, 0, 0.1, 0.5])
    world.clears = lambda: dice.random() < how_often
    for _ in range(dice.randint(2, 5)):
        for _ in range(dice.choice([0, 0, 1, 3])):
            world.step()
        length, new = dice.randint(1, 7), dice.randint(1, 8)
        if length + new > world.limits.max_len:
            continue
        prompt, priority = [dice.randrange(3) for _ in range(length)], dice.choice([0, 0, 1, 1000])
        if dice.random() < 0.6:
            num_beams = dice.randint(1, 4)
            options = BeamOptions(num_beams, dice.choice([0.0, 1.0, 1.5]), dice.random() < 0.5)
            request = world.submit_search(prompt, new, options, num_beams, priority)
        else:
            request = world.submit(make_request(prompt, new, dice.randint(1, 3), priority))
        if dice.random() < 0.2:
            world.cancel(request, after=dice.randint(1, 20))
    return world


def test_any_mix_gives_what_each_gives_alone() -> None:
    happened: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        world = mixed(random.Random(seed))
        world.run(4000)
        world.check_searches()
        happened["searches"] += len(world.searches)
        happened["preempted"] += sum(request.num_preemptions for request in world.searches)
        happened["swapped out"] += world.scheduler.state.num_swapped_out
        happened["failed"] += world.num_failed
        happened["cleared"] += world.num_cleared
        happened["cancelled"] += len(world.cancelled)
        world.requests = [request for request in world.requests if request not in world.searches]
        world.check_outputs()
    assert min(happened.values()) > 10, happened


@pytest.mark.parametrize("max_step_items", todays([1, 2, 4], 1))
def test_so_it_does_where_a_step_may_have_few_items(max_step_items: int) -> None:
    num_full_steps = 0
    for seed in range(25):
        world = mixed(random.Random(seed), max_step_items)
        world.run(4000)
        world.check_searches()
        num_full_steps += world.num_full_steps
    assert num_full_steps > 30
