"""The cache service's metrics as Prometheus families, one for each number of the protocol's PoolStats, labelled by pool,
and of its GroupStats, labelled by group of layers too; missed tokens by cause, hit rates by size.

The comment of a field is the family's help text.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvkeeper.common.service.metrics import build_info
from kvkeeper.common.service.output import num_dropped_lines
from kvkeeper.common.trust.guard import Guard

from .rpc.convert.reports import (
    CURVE_TEXT,
    GROUP_NUMBERS,
    MISSED_TEXT,
    POOL_NUMBERS,
    SERVICE_NUMBERS,
    PoolStats,
    missed_by_cause,
    pool_stats,
)
from .runtime.session_manager import SessionManager

_PREFIX = "kvkeeper_cache_"


def cache_metrics(session_manager: SessionManager, guard: Guard) -> Iterator[Metric]:
    """Everything of one scrape. Called on the loop that owns the core."""
    pools = session_manager.registry.pools
    rows = [((pool.info.spec.model_id, str(place)), pool_stats(pool)) for place, pool in enumerate(pools)]
    for number in POOL_NUMBERS:
        kind = CounterMetricFamily if number.is_sum else GaugeMetricFamily
        family = kind(_name(number.name), number.text, labels=("model", "pool"))
        for labels, stats in rows:
            family.add_metric(labels, getattr(stats, number.name))
        yield family
    for number in GROUP_NUMBERS:
        name = f"{_PREFIX}group_{number.name.removeprefix('num_')}"
        family = GaugeMetricFamily(name, number.text, labels=("model", "pool", "group"))
        for labels, stats in rows:
            for group, counts in enumerate(stats.groups):
                family.add_metric((*labels, str(group)), getattr(counts, number.name))
        yield family
    yield from _miss_metrics(rows)
    yield GaugeMetricFamily(_PREFIX + "live_sessions", "Live sessions.", value=len(session_manager.sessions))
    sums = {
        "num_opened_sessions": session_manager.num_opened,
        "num_reaped_sessions": session_manager.num_reaped,
        "num_replaced_pools": session_manager.registry.num_replaced,
        "num_dropped_log_lines": num_dropped_lines(),
    }
    for number in SERVICE_NUMBERS:
        yield CounterMetricFamily(_name(number.name), number.text, value=sums[number.name])
    yield from guard.metrics(_PREFIX)
    yield build_info(_PREFIX)


def _miss_metrics(rows: Sequence[tuple[tuple[str, str], PoolStats]]) -> Iterator[Metric]:
    """Missed tokens by cause, and hit rates by size."""
    missed = CounterMetricFamily(_PREFIX + "missed_tokens", MISSED_TEXT, labels=("model", "pool", "cause", "need"))
    curve = GaugeMetricFamily(_PREFIX + "curve_hit_rate", CURVE_TEXT, labels=("model", "pool", "size"))
    for labels, stats in rows:
        for words, num_tokens in missed_by_cause(stats).items():
            missed.add_metric((*labels, *words), num_tokens)
        for point in stats.curve:
            curve.add_metric((*labels, f"{point.size:g}"), point.hit_rate)
    yield missed
    yield curve


def _name(field_name: str) -> str:
    return _PREFIX + field_name.removeprefix("num_")
