"""The simulated pool with watches on it: whatever engines do to it, their readers have what the index has."""

import random

import pytest

from cache_service.events import EventFeed
from cache_service.types import EventKind, PressureLevel
from tests.sim.simulation import Simulation
from tests.support.event_reader import SPEC_KEY, EventReader, names_in
from tests.support.world import TENANTS

NUM_TICKS = 1500


def _watched(seed: int, kinds: set[EventKind]) -> int:
    """Runs one seed. Answers the blocks told of."""
    simulation, dice = Simulation(seed), random.Random(seed)
    index = simulation.driver.manager.tables.index
    feed, num_told = EventFeed(index, SPEC_KEY, PressureLevel.LOW, lambda: None), 0
    readers: list[EventReader] = []
    for tick in range(NUM_TICKS):
        simulation.tick()
        if len(readers) < 6 and dice.random() < 0.01:
            tenant = dice.choice(TENANTS)
            readers.append(EventReader(tenant, feed.open(tenant)))
        elif len(readers) > 3 and dice.random() < 0.01:
            feed.close(readers.pop(dice.randrange(len(readers))).watch)
        feed.advance(dice.randint(1, 4))
        for reader in readers:
            reader.read(dice.randint(0, 2))
        if tick % 100 == 99:
            while feed.advance(100):
                pass
            for reader in readers:
                reader.read()
                assert reader.blocks == names_in(index, reader.tenant), f"seed {seed}"
                num_told += len(reader.blocks)
                kinds.update(reader.kinds)
    return num_told


@pytest.mark.parametrize("first_seed", [0, 6])
def test_readers_have_what_the_index_has(first_seed: int) -> None:
    kinds: set[EventKind] = set()
    assert sum(_watched(seed, kinds) for seed in range(first_seed, first_seed + 6)) > 100
    assert {EventKind.SNAPSHOT, EventKind.SNAPSHOT_END, EventKind.STORED, EventKind.REMOVED} <= kinds
