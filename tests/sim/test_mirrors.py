"""Mirrors of a pool with every tier switched on have what its tiers have, wherever it moves and whatever is lost."""

import random
from collections import Counter
from functools import partial

import pytest

from kvkeeper.cache_service.core.index.events.event_feed import EventFeed
from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.tiers.content_tier import ContentTier
from kvkeeper.cache_service.core.values.types import EventKind, PressureLevel, Tier
from tests.support.slices import todays
from tests.support.tiers.disk_simulation import DiskSimulation
from tests.support.tiers.disk_world import KEY
from tests.support.tiers.mirror_world import MirrorWorld, Outliving, disk_and_remote, reached
from tests.support.tiers.store_storm import StoreStorm
from tests.support.worlds.event_reader import SPEC_KEY, EventReader
from tests.support.worlds.kept_pool import KeptMemory, write_all
from tests.support.worlds.scopes import SCOPES

NUM_SEEDS, NUM_OPERATIONS = 32, 1_000
MOVES = {EventKind.SNAPSHOT, EventKind.STORED, EventKind.TIER_CHANGED}


class Mirrors:
    """One seed: a pool with every tier, readers that come and go, and restarts of the service."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.outliving = Outliving()
        disk_tenants = frozenset({"other"}) if self.dice.random() < 0.5 else None
        world = partial(MirrorWorld, outliving=self.outliving, disk_tenants=disk_tenants)
        self.simulation = DiskSimulation(seed, world=world)
        self.seen: Counter[tuple[EventKind, Tier | None]] = Counter()
        self.num_restarts = self.num_restored = 0
        self._begin()

    def run(self, num_operations: int = NUM_OPERATIONS) -> None:
        for number in range(num_operations):
            self._tick()
            if self.simulation.world is not self.world:
                self._begin()
            self._read()
            if number % 25 == 24:
                self._check()
                self._check_restart()
        self.world.drain()
        self._check()

    @property
    def world(self) -> MirrorWorld:
        return self._world

    def _begin(self) -> None:
        """A run of the service: its pool is new, but for what outlives it."""
        world = self.simulation.world
        assert isinstance(world, MirrorWorld)
        self._world = world
        self.memory = KeptMemory(world.config)
        world.manager.restore(self.memory.kept, may_still_write=False)
        self.feed, self.readers = open_feed(world.manager), list[EventReader]()
        self.num_restarts += 1

    def _tick(self) -> None:
        """One operation of the pool, of the store, or of its clients."""
        world, choose, event = self.world, self.simulation.choose, self.dice.random()
        if event < 0.6:
            self.simulation.tick()
        elif event < 0.72:
            world.store_remotely(1 + choose(4))
        elif event < 0.9:
            world.work_remotely(choose, self.simulation.faults)
        elif event < 0.94:
            world.forget_remotely(choose)
        elif event < 0.96:
            world.manager.record.write(1 + choose(8))
        elif len(self.readers) < 5:
            tenant = self.dice.choice(SCOPES)
            self.readers.append(EventReader(tenant, self.feed.open(tenant, wants_tokens=self.dice.random() < 0.5)))
        else:
            self.feed.close(self.readers.pop(self.dice.randrange(len(self.readers))).watch)
            if not self.feed.watches:
                self.feed = open_feed(world.manager)

    def _read(self) -> None:
        self.feed.advance(self.dice.randint(1, 6))
        for reader in self.readers:
            reader.read(self.dice.randint(0, 3))

    def _check(self) -> None:
        """Each mirror, and a snapshot of this moment, has what can be reached."""
        while self.feed.advance(1000):
            pass
        for tenant in SCOPES:
            snapshot = EventReader(tenant, self.feed.open(tenant))
            while self.feed.advance(1000):
                pass
            snapshot.read()
            wanted = reached(self.world.manager, disk_and_remote(self.world), self.outliving.ever, tenant)
            assert snapshot.is_complete
            assert snapshot.blocks == wanted
            for reader in self.readers:
                if reader.tenant == tenant:
                    reader.read()
                    assert reader.blocks == wanted
                    self.seen.update(reader.told)
                    reader.told.clear()
            self.feed.close(snapshot.watch)
        if not self.readers:
            self.feed = open_feed(self.world.manager)

    def _check_restart(self) -> None:
        """What the next run would tell, if this one were killed now and its memory kept."""
        self.world.manager.maintenance.publish_pending()
        write_all(self.world.manager)
        manager, _ = self.memory.restored()
        world, disk = self.world, self.world.disk
        stored = [slot.stored_block for slot in world.slab.values() if slot.order.era == disk.flight.era]
        tiers: list[tuple[ContentTier, bytes]] = [
            (manager.add_disk(KEY, disk.directory.num_slots, disk.flight.era, stored), KEY)
        ]
        feed = open_feed(manager)
        for tenant in SCOPES:
            reader = EventReader(tenant, feed.open(tenant, wants_tokens=True))
            while feed.advance(7):
                pass
            reader.read()
            assert reader.blocks == reached(manager, tiers, self.outliving.ever, tenant)
            self.num_restored += Tier.DISK in reader.blocks.values()


def open_feed(manager: PoolManager) -> EventFeed:
    return EventFeed(manager.state.index, SPEC_KEY, PressureLevel.LOW, lambda: None, below=manager.state.below_blocks)


@pytest.mark.parametrize("first_seed", todays(range(0, NUM_SEEDS, 16), 1))
def test_mirrors_have_what_can_be_reached_in_every_tier(first_seed: int) -> None:
    seen: Counter[tuple[EventKind, Tier | None]] = Counter()
    num_restarts = num_restored = 0
    for seed in range(first_seed, first_seed + 16):
        mirrors = Mirrors(seed)
        try:
            mirrors.run()
        except BaseException as error:
            error.add_note(f"mirrors, seed {seed}")
            raise
        seen += mirrors.seen
        num_restarts, num_restored = num_restarts + mirrors.num_restarts, num_restored + mirrors.num_restored
    # The run counts only if each tier was told of in each way.
    assert not {(kind, tier) for kind in MOVES for tier in (Tier.DISK, Tier.REMOTE)} - seen.keys(), seen
    assert seen[EventKind.REMOVED, None] >= 100
    assert num_restarts > 16
    assert num_restored >= 50


def test_mirrors_of_two_services_on_one_store_have_what_each_was_heard_to_have() -> None:
    seen: Counter[tuple[EventKind, Tier | None]] = Counter()
    num_damaged = num_missing = 0
    for seed in range(8):
        storm, dice = StoreStorm(seed), random.Random(seed)
        feeds = [open_feed(service.manager) for service in storm.services]
        readers = [[EventReader(tenant, feed.open(tenant)) for tenant in SCOPES] for feed in feeds]
        for number in range(NUM_OPERATIONS):
            storm.tick()
            is_checked = number % 25 == 24
            for feed, service, mirrors in zip(feeds, storm.services, readers, strict=True):
                while feed.advance(dice.randint(1, 8)) and (is_checked or dice.random() < 0.5):
                    pass
                for reader in mirrors:
                    reader.read(10**9 if is_checked else dice.randint(0, 2))
                    if is_checked:
                        wanted = reached(service.manager, service.keyed_tiers(), service.ever, reader.tenant)
                        assert reader.blocks == wanted, f"seed {seed}, operation {number}"
        for mirrors in readers:
            seen.update(told for reader in mirrors for told in reader.told)
        stats = [service.manager.queries.stats() for service in storm.services]
        num_damaged += sum(getattr(each, f"num_damaged_{tier}_blocks", 0) for each in stats for tier in ("remote", "disk"))
        num_missing += storm.num_forgotten
    assert not {(kind, tier) for kind in MOVES - {EventKind.SNAPSHOT} for tier in (Tier.DISK, Tier.REMOTE)} - seen.keys(), seen
    assert min(seen[EventKind.REMOVED, None], num_damaged, num_missing) >= 5
