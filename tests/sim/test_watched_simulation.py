"""Simulated pools with watches on them: readers have what the index has, in each tier, at all times."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvkeeper.cache_service.core.index.events.event_feed import EventFeed
from kvkeeper.cache_service.core.index.prefix_index import PrefixIndex
from kvkeeper.cache_service.core.values.types import EventKind, PressureLevel
from tests.sim.simulation import Simulation
from tests.support.slices import todays
from tests.support.tiers.tier_simulation import TierSimulation
from tests.support.worlds.event_reader import SPEC_KEY, EventReader, names_in
from tests.support.worlds.scopes import SCOPES

CHANGES = {EventKind.SNAPSHOT, EventKind.SNAPSHOT_END, EventKind.STORED, EventKind.REMOVED}


def _watched(index: PrefixIndex, tick: Callable[[], None], num_ticks: int, seed: int, kinds: set[EventKind]) -> tuple[int, int]:
    """Runs one seed. Returns the blocks told of, and how often a removal was told to a reader within its snapshot."""
    dice, num_told, num_late = random.Random(seed), 0, 0
    feed = EventFeed(index, SPEC_KEY, PressureLevel.LOW, lambda: None)
    readers: list[EventReader] = []
    for number in range(num_ticks):
        tick()
        if len(readers) < 6 and dice.random() < 0.02:
            tenant = dice.choice(SCOPES)
            readers.append(EventReader(tenant, feed.open(tenant, wants_tokens=dice.random() < 0.5)))
        elif len(readers) > 3 and dice.random() < 0.02:
            feed.close(readers.pop(dice.randrange(len(readers))).watch)
        feed.advance(dice.randint(1, 4))
        for reader in readers:
            num_late += not reader.is_complete and EventKind.REMOVED in [event.kind for event in reader.watch._events]
            reader.read(dice.randint(0, 2))
        if number % 100 == 99:
            while feed.advance(100):
                pass
            for reader in readers:
                reader.read()
                assert reader.blocks == names_in(index, reader.tenant), f"seed {seed}"
                num_told += len(reader.blocks)
                kinds.update(reader.kinds)
    return num_told, num_late


@pytest.mark.parametrize("first_seed", todays([0, 6], 1))
def test_readers_have_what_the_index_has(first_seed: int) -> None:
    kinds: set[EventKind] = set()
    sums = np.zeros(2, np.int64)
    for seed in range(first_seed, first_seed + 6):
        simulation = Simulation(seed)
        sums += _watched(simulation.driver.manager.state.index, simulation.tick, 1500, seed, kinds)
    num_told, num_late = sums.tolist()
    assert num_told > 100
    assert num_late > 0, "nothing was removed during a snapshot"
    assert kinds >= CHANGES


def test_readers_know_the_tier_of_each_block() -> None:
    kinds: set[EventKind] = set()
    sums = np.zeros(2, np.int64)
    for seed in range(16):
        simulation = TierSimulation(seed)
        sums += _watched(simulation.world.manager.state.index, simulation.tick, 300, seed, kinds)
    assert sums[0] > 100
    assert kinds >= CHANGES | {EventKind.TIER_CHANGED}
