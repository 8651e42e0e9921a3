"""Seeded simulation of engines on a pool with a disk tier: the disk fails, tears, lies and hangs, and the service is killed.

One seed replays everything. The pool is audited again and again, and each read and hit is compared with what the blocks hold.
"""

import random
from collections.abc import Callable
from typing import Any

from kvkeeper.cache_service.core.tiers.orders import TierRules
from kvkeeper.cache_service.core.values.kv_spec import ReadSpan, state_span
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Executor
from tests.support.reference.read_spans import make_spans
from tests.support.tiers.disk_world import DiskCounts, DiskWorld

NUM_EVENTS = 400  # of one seed
AUDIT_EVERY = 20  # events; an audit takes as long as several


class DiskSimulation:
    """One seed: a slab, and pools on it one after the other."""

    def __init__(self, seed: int, *, may_have_tail: bool = False, world: Callable[..., DiskWorld] = DiskWorld) -> None:
        """may_have_tail: in half of the pools with one window, the group with it is a tail. world: makes that of each run."""
        self._make_world = world
        self.rng = rng = random.Random(seed)
        spans = [make_spans(0), make_spans(0, 3), (*make_spans(0), ReadSpan(4, is_chunk=True)), make_spans(0, 0, 2)][seed % 4]
        spans = (*make_spans(0), state_span(2)) if seed % 8 == 4 else spans
        self.config = PoolConfig(
            num_blocks=rng.choice([4, 6, 9]) * len(spans),
            group_spans=spans,
            has_tail=may_have_tail and seed % 8 == 5,  # of the second of them
            block_size=rng.choice([1, 2, 3]),
            max_sequences=rng.choice([3, 6]),
            max_tokens_per_sequence=rng.choice([6, 12, 20]),
            watermark=0.0,
            eviction_policy=rng.choice(["lru", "adaptive"]),
            num_host_blocks=rng.choice([3, 5, 9]) * len(spans),
        )
        self.rules = TierRules(
            on_second_use=rng.choice([False, False, False, True]),
            deadline=rng.choice([0.5, 2.0]),
            most_loading=rng.choice([1, 2, 64]),
        )
        self.num_slots, self.faults = rng.choice([1, 3, 8, 24]) * len(spans), rng.choice([3, 8, 40])
        self.sizes: dict[str, Any] = {"alphabet": rng.choice([1, 1, 2]), "num_scopes": rng.choice([1, 2]), "faults": 20}
        self.counts = DiskCounts()
        self.world = world(self.config, self.num_slots, self.rules, **self.sizes)

    def choose(self, count: int) -> int:
        return int(self.rng.random() * count)

    def tick(self) -> None:
        """One event."""
        world, event = self.world, self.choose(400)
        if not world.engines or (len(world.engines) < 2 and event < 6):
            world.open(self.rng.choice([Executor.ENGINE, Executor.CACHE]))
        session = list(world.engines)[self.choose(len(world.engines))]
        if event < 60:
            world.create(session, self.choose)
        elif event < 66:
            world.report(session, self.choose)
        elif event < 70:
            world.close(session, may_still_write=bool(self.choose(2)))
        elif event < 76:
            if world.ended:
                world.end_quarantine(world.ended[self.choose(len(world.ended))])
        elif event < 79:
            world.flip(self.choose)
        elif event == 79:
            world.clear()
        elif event == 80:
            self.restart()
        elif event < 100:
            world.evict(session, self.choose(world.config.num_blocks))
        elif event < 130:
            world.store_some(1 + self.choose(4))
        elif event < 230:
            world.work(self.choose, self.faults)
        elif event < 236:
            world.hint(session, self.choose)
        elif event < 260:
            world.pass_time(self.rng.choice([0.01, 0.1, 1.0, 70.0]))
        else:
            world.step(session, self.choose)
        if not self.choose(AUDIT_EVERY):
            self.world.audit()

    def restart(self) -> None:
        """The service is killed and started again on the same slab."""
        old = self.world
        old.kill(self.choose)
        self._add_up(old)
        kept: dict[str, Any] = {"slab": old.slab, "contents": old.contents, "written": old.written, "era": old.disk.flight.era}
        self.world = self._make_world(self.config, self.num_slots, self.rules, **kept, **self.sizes)

    def finish(self) -> DiskCounts:
        """The last audit: no block of any tier is left behind. Returns the sums."""
        self.world.drain()
        self._add_up(self.world)
        return self.counts

    def _add_up(self, world: DiskWorld) -> None:
        stats, counts = world.manager.queries.stats(), world.disk_counts
        counts.late, counts.evicted = stats.num_late_disk_loads, stats.num_evicted_disk_blocks
        counts.rests, counts.damaged = stats.num_disk_rests, stats.num_damaged_disk_blocks
        counts.waits = stats.num_computing_answers
        self.counts.add(counts)


def simulate_disks(until: Callable[[DiskCounts], bool], seed: int = 1) -> DiskCounts:
    """Runs seed after seed until the sums are enough."""
    sums = DiskCounts()
    while not until(sums):
        simulation = DiskSimulation(seed, may_have_tail=True)
        try:
            for _ in range(NUM_EVENTS):
                simulation.tick()
            sums.add(simulation.finish())
        except BaseException as error:
            error.add_note(f"disk simulation, seed {seed}")
            raise
        seed += 1
    return sums
