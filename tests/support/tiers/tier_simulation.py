"""Seeded simulation of engines on a pool with a host tier: orders late, repeated, failed, never reported; engines that die.

One seed replays everything. After every core call the pool is audited, and every read, hit and swap-in is compared with what
the blocks of both tiers hold. `TierCounts` proves that each fault fired.
"""

import random
import sys
from collections.abc import Callable

from kvkeeper.cache_service.core.values.kv_spec import ReadSpan, state_span
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Executor
from tests.support.reference.read_spans import make_spans
from tests.support.tiers.tier_engine import TierCounts
from tests.support.tiers.tier_world import TierWorld

NUM_EVENTS = 300  # of one seed
_CHUNKS = ReadSpan(5, is_chunk=True), ReadSpan(2, is_chunk=True)
_ONE = make_spans(0)
# Of the groups of layers, by seed.
_STATES = (*_ONE, state_span(2)), (*make_spans(0, 3), state_span(1), state_span(3))
_SPANS = (
    *(make_spans(0, 1), make_spans(0, 4), (*_ONE, *_CHUNKS), _ONE, _STATES[0], _ONE),
    *(_STATES[1], make_spans(0, 0, 3), make_spans(0, 7, 2), _ONE),
)


def _may_be_tail(spans: tuple[ReadSpan, ...]) -> bool:
    return len(spans) > 1 and not any(span.is_whole or span.is_chunk or span.checkpoint_blocks for span in spans[1:])


class TierSimulation:
    """One seed: one pool, up to three sessions at a time."""

    def __init__(self, seed: int, *, may_have_tail: bool = False) -> None:
        """may_have_tail: in half of the pools with windows, the groups with windows are a tail."""
        self.rng = rng = random.Random(seed)
        spans = _SPANS[seed % len(_SPANS)]
        config = PoolConfig(
            num_blocks=rng.choice([4, 6, 9, 14]) * len(spans),
            group_spans=spans,
            has_tail=may_have_tail and seed % 20 >= 10 and _may_be_tail(spans),
            block_size=rng.choice([1, 2, 3]),
            max_sequences=rng.choice([3, 6, 10]),
            max_tokens_per_sequence=rng.choice([6, 12, 20]),
            watermark=rng.choice([0.0, 0.0, 0.2]),
            eviction_policy=rng.choice(["lru", "lru", "lfu", "priority", "adaptive", "longest_first"]),
            num_host_blocks=rng.choice([2, 5, 9, 17, 33]) * len(spans),
        )
        faults = rng.choice([2, 2, 6, 30, sys.maxsize // 8])
        sizes = {"alphabet": rng.choice([1, 1, 2]), "num_scopes": rng.choice([1, 2]), "at_once": rng.choice([1, 2, 10**9])}
        self.world = TierWorld(config, faults=faults, **sizes)

    def choose(self, count: int) -> int:
        return int(self.rng.random() * count)

    def tick(self) -> None:
        """One event."""
        world, event = self.world, self.choose(200)
        if not world.engines or (len(world.engines) < 3 and event < 6):
            world.open(self.rng.choice([Executor.ENGINE, Executor.ENGINE, Executor.CACHE]))
        session = list(world.engines)[self.choose(len(world.engines))]
        if event < 40:
            world.create(session, self.choose)
        elif event < 50:
            world.report(session, self.choose)
        elif event < 52:
            world.close(session, may_still_write=bool(self.choose(2)))
        elif event < 60:
            if world.ended:
                end = world.run_ended if self.choose(3) else world.end_quarantine
                end(world.ended[self.choose(len(world.ended))])
        elif event < 64:
            world.memory.run_one(session)
        elif event < 68:
            world.narrow(session, self.choose)
        elif event == 68:
            world.clear()
        elif event < 76:
            world.evict(session, self.choose(world.config.num_blocks))
        elif event < 82:
            world.refuse_step(session, self.choose)
        else:
            world.step(session, self.choose)
        world.audit()

    def finish(self) -> TierCounts:
        """The last audit: no block of either tier is left behind. Returns the sums."""
        self.world.drain()
        return self.world.counts


def simulate_tiers(until: Callable[[TierCounts], bool], seed: int = 1) -> TierCounts:
    """Runs seed after seed until the sums are enough, for example `lambda counts: counts.moved >= 1_000_000`."""
    sums = TierCounts()
    while not until(sums):
        simulation = TierSimulation(seed, may_have_tail=True)
        try:
            for _ in range(NUM_EVENTS):
                simulation.tick()
            sums.add(simulation.finish())
        except BaseException as error:
            error.add_note(f"tier simulation, seed {seed}")
            raise
        seed += 1
    return sums
