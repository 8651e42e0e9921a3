"""Both tiers under seeded simulation (docs/inside/reliability.md, promise 9 and 10); `make soak` runs longer."""

from tests.support.slices import FIRST_SEED, IS_WHOLE, scaled
from tests.support.tiers.tier_engine import TierCounts
from tests.support.tiers.tier_simulation import TierSimulation, simulate_tiers


def test_nothing_is_reused_or_lost_however_the_orders_end() -> None:
    counts = simulate_tiers(lambda sums: sums.steps >= scaled(17_000), FIRST_SEED)
    # The run counts only if its faults fired and its guarded paths were on; a slice may lack a few rare ones.
    names = TierCounts.__dataclass_fields__
    assert sum(getattr(counts, name) >= scaled(3) for name in names) >= len(names) - (0 if IS_WHOLE else 8), counts
    assert counts.moved >= scaled(1_000, 10)


def test_a_seed_replays_itself() -> None:
    def run() -> TierCounts:
        simulation = TierSimulation(11)
        for _ in range(200):
            simulation.tick()
        return simulation.finish()

    assert run() == run()
