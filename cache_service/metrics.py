"""The cache service's metrics as Prometheus families, one for each number of PoolStats, labelled by pool.

The families follow the protocol: a field of 32 bits is what is true now, one of 64 bits a sum over the pool's life, but for
those that are told apart here. What explains a family is the comment of its field.
"""

from collections.abc import Iterator

from google.protobuf.descriptor import FieldDescriptor
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache.v1.cache_service_pb2_comments import COMMENTS
from kvkeeper.service.metrics import build_info

from .runtime.session_manager import SessionManager

_FIELDS = [field for field in pb.PoolStats.DESCRIPTOR.fields if field.type != FieldDescriptor.TYPE_MESSAGE]
_GAUGES = {"used_bytes", "peak_used_bytes"}  # of 64 bits, and not sums
_PREFIX = "kvkeeper_cache_"


def cache_metrics(session_manager: SessionManager) -> Iterator[Metric]:
    """Everything of one scrape. Called on the loop that owns the core."""
    rows = [((pool.info.spec.model_id, str(place)), pool.stats()) for place, pool in enumerate(session_manager.registry.pools)]
    for field in _FIELDS:
        name, text = _PREFIX + field.name.removeprefix("num_"), COMMENTS[f"PoolStats.{field.name}"]
        is_sum = field.type == FieldDescriptor.TYPE_INT64 and field.name not in _GAUGES
        family = (CounterMetricFamily if is_sum else GaugeMetricFamily)(name, text, labels=("model", "pool"))
        for labels, stats in rows:
            family.add_metric(labels, getattr(stats, field.name))
        yield family
    yield GaugeMetricFamily(_PREFIX + "live_sessions", "Live sessions.", value=len(session_manager.sessions))
    for field_name, count in (
        ("num_opened_sessions", session_manager.num_opened),
        ("num_reaped_sessions", session_manager.num_reaped),
        ("num_replaced_pools", session_manager.registry.num_replaced),
    ):
        name = _PREFIX + field_name.removeprefix("num_")
        yield CounterMetricFamily(name, COMMENTS[f"GetStatsResponse.{field_name}"], value=count)
    yield build_info(_PREFIX)
