"""The remote tier: two cache services with different pools on one store that fails, lies, forgets, hangs and is cleared."""

from tests.support.slices import at_least, todays
from tests.support.tiers.store_storm import store_storm

NUM_STORMS, NUM_ORDERS = 10, 2_500


def test_two_services_bring_no_wrong_block_from_one_store() -> None:
    storms = [store_storm(NUM_ORDERS, seed) for seed in todays(range(1, NUM_STORMS + 1), 2)]
    services = [service for storm in storms for service in storm.services]
    stats = [service.manager.queries.stats() for service in services]
    assert sum(storm.num_orders for storm in storms) >= len(storms) * NUM_ORDERS
    assert sum(service.num_remote_orders for service in services) >= at_least(10_000)
    # The run counts only if its faults fired and its guarded paths were on, in both services.
    for at in (0, 1):
        assert sum(each.num_remote_hit_blocks for each in stats[at::2]) >= at_least(1_000)
        assert sum(each.num_remote_rests for each in stats[at::2]) >= at_least(100)
        assert sum(each.num_damaged_remote_blocks for each in stats[at::2]) >= at_least(20)
        assert sum(each.num_unworthy_remote_loads for each in stats[at::2]) >= at_least(20)
        assert sum(service.num_faults for service in services[at::2]) >= at_least(100)
    assert sum(each.num_disk_hit_blocks for each in stats[::2]) >= at_least(500)
    assert sum(storm.store.num_clears for storm in storms) >= at_least(50)
    assert sum(storm.num_forgotten for storm in storms) >= at_least(500)


def test_a_seed_replays_itself() -> None:
    first, again = (store_storm(200, 3) for _ in range(2))
    assert first.store.values == again.store.values
    assert [each.manager.queries.stats() for each in first.services] == [
        each.manager.queries.stats() for each in again.services
    ]
