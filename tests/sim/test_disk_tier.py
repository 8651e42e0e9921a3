"""The disk tier: late, failed, torn, flipped and hanging orders, clearings, kills and restarts on one slab."""

from tests.support.slices import FIRST_SEED, IS_WHOLE, at_least, scaled, todays
from tests.support.tiers.disk_simulation import DiskSimulation, simulate_disks
from tests.support.tiers.disk_storm import storm
from tests.support.tiers.disk_world import DiskCounts

NUM_STORMS, NUM_ORDERS = 20, 5_000


def test_engines_read_no_wrong_byte_from_a_disk_that_fails_lies_hangs_and_outlives_the_service() -> None:
    counts = simulate_disks(lambda sums: sums.orders >= scaled(1_200), FIRST_SEED)
    # The run counts only if its faults fired and its guarded paths were on; a slice may lack a few rare ones.
    names = DiskCounts.__dataclass_fields__
    assert sum(getattr(counts, name) >= scaled(5) for name in names) >= len(names) - (0 if IS_WHOLE else 3), counts


def test_a_hundred_thousand_orders_leave_what_the_naive_model_has_and_bring_no_wrong_block() -> None:
    storms = [storm(lambda world: world.num_orders >= NUM_ORDERS, seed) for seed in todays(range(1, NUM_STORMS + 1), 2)]
    assert sum(world.num_orders for world in storms) >= len(storms) * NUM_ORDERS
    assert sum(world.num_loaded for world in storms) >= at_least(10_000)
    assert sum(world.num_rests for world in storms) >= at_least(20)
    for name in ("num_damaged", "num_restarts", "num_clears", "num_joined"):
        assert sum(getattr(world, name) for world in storms) >= at_least(100), name


def test_a_seed_replays_itself() -> None:
    def run() -> DiskCounts:
        simulation = DiskSimulation(11)
        for _ in range(200):
            simulation.tick()
        return simulation.finish()

    assert run() == run()
