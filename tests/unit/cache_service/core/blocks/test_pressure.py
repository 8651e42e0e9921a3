"""Pressure, the threshold above which cached blocks are evicted early, and eviction to a target."""

import pytest

from kvkeeper.cache_service.core.blocks.pressure import PressureGauge
from kvkeeper.cache_service.core.values.errors import InvalidField
from kvkeeper.cache_service.core.values.types import PressureLevel
from tests.support.worlds.core_pool import CorePool

LOW, MEDIUM, HIGH, CRITICAL = PressureLevel


def test_a_level_is_entered_at_its_ratio_and_left_0_05_below_it() -> None:
    gauge = PressureGauge((0.6, 0.8, 0.95), 100)
    walk = [59, 60, 56, 55, 95, 91, 90, 80, 76, 75, 56, 55, 0]
    wanted = [LOW, MEDIUM, MEDIUM, LOW, CRITICAL, CRITICAL, HIGH, HIGH, HIGH, MEDIUM, MEDIUM, LOW, LOW]
    told: list[PressureLevel] = []
    gauge.on_change = told.append
    assert [gauge.update(used) for used in walk] == wanted
    assert told == [MEDIUM, LOW, CRITICAL, HIGH, MEDIUM, LOW]
    assert gauge.num_changes == len(told)


@pytest.mark.parametrize("ratios", [(0.6, 0.8, 0.95), (0.01, 0.02, 0.03), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("num_usable", [1, 2, 1000])
def test_an_empty_pool_is_never_under_pressure(ratios: tuple[float, ...], num_usable: int) -> None:
    gauge = PressureGauge(ratios, num_usable)
    assert gauge.update(0) is LOW
    assert gauge.update(num_usable) is CRITICAL
    assert gauge.update(0) is LOW


@pytest.mark.parametrize("ratios", [(0.0, 0.5, 1.0), (0.5, 0.4, 0.6), (0.5, 0.6), (0.5, 0.6, 1.1), (0.1, 0.2, float("nan"))])
def test_ratios_that_are_no_levels_are_refused(ratios: tuple[float, ...]) -> None:
    with pytest.raises(InvalidField):
        PressureGauge(ratios, 10)


def test_cached_blocks_are_no_pressure() -> None:
    pool = CorePool(num_blocks=11)
    pool.prefill(1, range(40))
    assert pool.manager.state.gauge.level is CRITICAL
    reply = pool.step(releases=[1])
    assert (reply.pressure, pool.manager.state.gauge.level) == (LOW, LOW)
    assert pool.manager.queries.stats().num_pressure_changes == 2


def cached_pool(**config: object) -> CorePool:
    """Ten blocks: two held, six cached, two free."""
    pool = CorePool(num_blocks=11, **config)
    pool.prefill(1, range(8))
    pool.prefill(2, range(100, 124))
    pool.step(releases=[2])
    return pool


def test_cached_blocks_above_the_threshold_are_evicted_before_they_are_needed() -> None:
    pool = cached_pool(evict_above=0.5)
    assert [
        pool.manager.evictions.evict_excess(2),
        pool.manager.evictions.evict_excess(2),
        pool.manager.evictions.evict_excess(2),
    ] == [2, 1, 0]
    stats = pool.manager.queries.stats()
    assert (stats.num_free_blocks, stats.num_cached_blocks, stats.num_evicted_blocks) == (5, 3, 3)
    pool.audit()
    assert cached_pool().manager.evictions.evict_excess(100) == 0  # only when needed


@pytest.mark.parametrize(("how", "evicted"), [("free 4", 2), ("free 1", 0), ("count 5", 5), ("count 99", 6), ("share 0.3", 5),
                                              ("share 0.0", 6), ("share 1.0", 0)])  # fmt: skip
def test_eviction_to_a_target_stops_there(how: str, evicted: int) -> None:
    pool = cached_pool()
    kind, number = how.split()
    manager = pool.manager
    evictions = manager.evictions
    done = {"free": lambda: evictions.evict_blocks(int(number)), "count": lambda: evictions.evict_count(int(number)),
            "share": lambda: evictions.evict_to(float(number))}[kind]()  # fmt: skip
    assert (done, manager.queries.stats().num_free_blocks) == (evicted, 2 + evicted)
    pool.audit()


def test_idle_time_is_since_the_last_step_or_read() -> None:
    pool = CorePool()
    pool.prefill(1, range(4))
    pool.manager.state.tick(3.0)
    assert pool.view(1).idle_seconds == 3.0
    before = pool.view(1).num_accesses
    pool.manager.updates.note_read("a", 1)  # type: ignore[arg-type]
    assert (pool.view(1).idle_seconds, pool.view(1).num_accesses) == (0.0, before + 1)
    pool.manager.state.tick(5.0)
    pool.step(reserves=[(1, 5, 5)])
    pool.manager.state.tick(6.0)
    assert pool.view(1).idle_seconds == 1.0
