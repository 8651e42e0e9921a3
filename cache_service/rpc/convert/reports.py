"""The reports that the service gives of itself, as messages: pools, sessions, blocks, explanations, events."""

from collections import Counter
from typing import NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache.v1.cache_service_pb2_comments import COMMENTS
from kvkeeper.common.cuda import handle as cuda_handles
from kvkeeper.common.cuda import vmm

from ...core.index.events.watch import Event
from ...core.inspection.explain import Explanation, in_words
from ...core.values.views import BlockView, Miss
from ...runtime.lease import Session
from ...runtime.live_session import CarrierKind
from ...runtime.pool import Pool, PoolInfo
from .kv_spec import kv_spec_message, to_kv_dtype

PoolStats = pb.PoolStats
_INFO_NAMES = tuple(name for name in PoolInfo.__slots__ if name not in ("spec", "arena_kind", "host_kv_dtype"))
_ARENA_KINDS = {
    "memfd": pb.ARENA_KIND_MEMFD,
    cuda_handles.KIND: pb.ARENA_KIND_CUDA_IPC,
    vmm.DESCRIPTOR_KIND: pb.ARENA_KIND_CUDA_VMM,
}


class Number(NamedTuple):
    """A number of the protocol, for the metrics. text is its comment in the protocol."""

    name: str
    text: str
    is_sum: bool  # over the life of the pool or service; otherwise the number is true now


def _numbers(message: str, names: list[str]) -> tuple[Number, ...]:
    """In the protocol a field of 32 bits is true now, and one of 64 bits a sum, except for bytes and entries."""
    fields = pb.DESCRIPTOR.message_types_by_name[message].fields_by_name
    sums = {
        name for name in names if fields[name].type == FieldDescriptor.TYPE_INT64 and not name.endswith(("_bytes", "_entries"))
    }
    return tuple(Number(name, COMMENTS[f"{message}.{name}"], name in sums) for name in names)


POOL_NUMBERS = _numbers(
    "PoolStats", [field.name for field in pb.PoolStats.DESCRIPTOR.fields if field.type != FieldDescriptor.TYPE_MESSAGE]
)
GROUP_NUMBERS = _numbers("GroupStats", ["num_held_entries", "num_passed_entries"])
MISSED_TEXT, CURVE_TEXT = COMMENTS["Miss.num_tokens"], COMMENTS["CurvePoint.hit_rate"]
SERVICE_NUMBERS = _numbers(
    "GetStatsResponse", [field.name for field in pb.GetStatsResponse.DESCRIPTOR.fields if field.name.startswith("num_")]
)


def pool_info(info: PoolInfo) -> pb.PoolInfo:
    """Field names are the same on both sides, but for the spec and the kind of the arena."""
    values = {name: getattr(info, name) for name in _INFO_NAMES}
    return pb.PoolInfo(
        spec=kv_spec_message(info.spec),
        arena_kind=_ARENA_KINDS[info.arena_kind],
        host_kv_dtype=to_kv_dtype(info.host_kv_dtype),
        **values,
    )


def pool_stats(pool: Pool, *, names_tenants: bool = False) -> pb.PoolStats:
    """Field names are the same on both sides; bytes and watches are added to the core's counts."""
    stats, info = pool.manager.queries.stats(), pool.info
    stats.misses = _misses(stats.misses, names_tenants=names_tenants)
    stats.curve = [pb.CurvePoint(**point._asdict()) for point in stats.curve]
    groups = [pb.GroupStats(**each._asdict()) for each in pool.manager.queries.group_stats()]
    bytes_of_ranks = info.spec.num_ranks * info.block_bytes
    num_used = info.num_blocks - 1 - stats.num_free_blocks - stats.num_cached_blocks
    return pb.PoolStats(
        pool=pool_info(info),
        groups=groups,
        used_bytes=num_used * bytes_of_ranks,
        peak_used_bytes=stats.peak_used_blocks * bytes_of_ranks,
        num_watches=pool.num_watches,
        num_lagged_watches=pool.num_lagged_watches,
        disk_read_rate_bytes=pool.disk.reads.bytes_per_second if pool.disk is not None else 0,
        disk_write_rate_bytes=pool.disk.writes.bytes_per_second if pool.disk is not None else 0,
        remote_read_rate_bytes=pool.remote.reads.bytes_per_second if pool.remote is not None else 0,
        remote_write_rate_bytes=pool.remote.writes.bytes_per_second if pool.remote is not None else 0,
        **vars(stats),
    )


def _misses(misses: list[Miss], *, names_tenants: bool) -> list[pb.Miss]:
    """What tenants missed, by their names or all together."""
    sums: dict[Miss, int] = {}
    for miss in misses:
        shown = miss._replace(num_tokens=0) if names_tenants else miss._replace(num_tokens=0, tenant="", evicted_for="")
        sums[shown] = sums.get(shown, 0) + miss.num_tokens
    return [pb.Miss(**kind._replace(num_tokens=num_tokens)._asdict()) for kind, num_tokens in sums.items()]


def missed_by_cause(stats: PoolStats) -> Counter[tuple[str, str]]:
    """Missed tokens by cause and need, in words. Those that are being loaded are left out, because they are no sum."""
    sums: Counter[tuple[str, str]] = Counter()
    for miss in stats.misses:
        if miss.cause != pb.MATCH_END_LOADING:
            need = pb.EvictionNeed.Name(miss.need) if miss.need else ""
            words = pb.MatchEnd.Name(miss.cause).removeprefix("MATCH_END_"), need.removeprefix("EVICTION_NEED_")
            sums[words[0].lower(), words[1].lower()] += miss.num_tokens
    return sums


def session_info(
    session: Session, now: float, num_sequences: int, num_processes: int, carrier: CarrierKind | None
) -> pb.SessionInfo:
    """A session for people to look at. The ids of all sessions are shown, because all clients have the same role."""
    return pb.SessionInfo(
        session_id=session.id,
        client_name=session.client_name,
        executor=int(session.executor),  # type: ignore[arg-type]  # the numbers are the protocol's, as below
        step_id=session.step_id,
        completed_step_id=session.completed_step_id,
        num_sequences=num_sequences,
        lease_left_ms=max(0, round((session.deadline - now) * 1000)),
        num_attached_processes=num_processes,
        step_carrier=int(carrier or 0),  # type: ignore[arg-type]
    )


def block_info(view: BlockView) -> pb.GetBlockResponse:
    """A block for people to look at."""
    return pb.GetBlockResponse(**{name: getattr(view, name) for name in BlockView.__slots__})


def explanation(found: Explanation, host_kv_dtype: str) -> pb.ExplainMatchResponse:
    """In numbers and in words. host_kv_dtype: of the pool's host tier."""
    kept_in = host_kv_dtype if found.num_host else ""
    precision = f"; what is on the host is kept in {kept_in}" if kept_in else ""
    return pb.ExplainMatchResponse(
        num_matched_tokens=found.num_matched,
        explanation=in_words(found) + precision,
        end=int(found.end),  # type: ignore[arg-type]  # the numbers are the protocol's
        num_host_tokens=found.num_host,
        num_hit_tokens=found.num_hit,
        num_common_tokens=found.num_common,
        ended_ms_ago=max(1, round(found.seconds_ago * 1000)) if found.seconds_ago is not None else 0,
        host_kv_dtype=to_kv_dtype(kept_in),
        num_disk_tokens=found.behind.num_disk,
        num_remote_tokens=found.behind.num_remote,
        remote_not_asked=found.behind.remote_not_asked,
    )


def watch_event(event: Event, revision: int) -> pb.WatchEventsResponse:
    """One message of a watch."""
    return pb.WatchEventsResponse(
        revision=revision,
        kind=int(event.kind),  # type: ignore[arg-type]  # the numbers are the protocol's, as below
        block_names=event.names,
        parent_names=event.parents,
        tier=int(event.tier or 0),  # type: ignore[arg-type]
        pressure=int(event.pressure or 0),  # type: ignore[arg-type]
        replaced_model_id=event.replaced_model_id,
        token_ids=b"".join(event.tokens),
    )
