"""Both tiers under seeded simulation (docs/inside/reliability.md, promise 9 and 10), a short slice of what a long run does."""

from tests.support.tiers.tier_engine import TierCounts
from tests.support.tiers.tier_simulation import TierSimulation, simulate_tiers


def test_nothing_is_reused_or_lost_however_the_orders_end() -> None:
    counts = simulate_tiers(lambda sums: sums.steps >= 17_000)
    # The run counts only if its faults fired and its guarded paths were on.
    for name in TierCounts.__dataclass_fields__:
        assert getattr(counts, name) >= 3, (name, counts)
    assert counts.moved >= 1_000


def test_a_seed_replays_itself() -> None:
    def run() -> TierCounts:
        simulation = TierSimulation(11)
        for _ in range(200):
            simulation.tick()
        return simulation.finish()

    assert run() == run()
