"""Engines that overlap steps, fork, move what they fork, and die at any moment: they write into no other's block."""

import random

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from tests.support.reference.read_spans import make_spans
from tests.support.tiers.tier_engine import TierCounts
from tests.support.tiers.tier_events import act, any_session
from tests.support.tiers.tier_world import TierWorld
from tests.support.worlds.moments import check_contents, check_crash, check_residue

NUM_SEEDS, NUM_EVENTS = 8, 150


def crashing(seed: int) -> tuple[TierCounts, int, int]:
    """One seed. Returns what happened, the blocks that engines wrote after their end, and those of unknown content."""
    rng = random.Random(seed)
    spans = make_spans(0, 3) if seed % 3 == 1 else make_spans(0)
    config = PoolConfig(
        num_blocks=rng.choice([12, 16, 24]) * len(spans),
        group_spans=spans,
        block_size=2,
        max_sequences=rng.choice([6, 10]),
        max_tokens_per_sequence=rng.choice([8, 16]),
        watermark=0.0,
        num_host_blocks=rng.choice([9, 33]) * len(spans),
    )
    world = TierWorld(config, alphabet=rng.choice([1, 2]), faults=rng.choice([6, 1000]))
    world.forks_much = True
    num_written = num_unknown = 0

    def choose(count: int) -> int:
        return int(rng.random() * count)

    for _ in range(NUM_EVENTS):
        event = choose(100)
        session = any_session(world, choose)
        act(world, session, event, choose)
        world.audit()
        check_contents(world)
        if session in world.engines and len(world.memory.in_flight.get(session, ())) > 1:
            num_written += check_crash(world, session)
            num_unknown += check_residue(world, session) if choose(3) == 0 else 0
    world.drain()
    return world.counts, num_written, num_unknown


def test_what_an_engine_writes_after_its_end_is_nobodys() -> None:
    sums, num_written, num_unknown = TierCounts(), 0, 0
    for seed in range(NUM_SEEDS):
        try:
            counts, *numbers = crashing(seed)
        except BaseException as error:
            error.add_note(f"crashes, seed {seed}")
            raise
        sums.add(counts)
        num_written, num_unknown = num_written + numbers[0], num_unknown + numbers[1]
    # The run counts only if what it is about has happened.
    assert min(sums.moved_children, num_unknown) > 40, (sums, num_unknown)
    assert min(num_written, 50 * sums.deaths) > 400, (num_written, sums)
