"""Messages to values of the core and back: the only module that knows both.

Checks what the core cannot see any more once it has values: sizes of columns, ranges of narrower types, lengths of texts. The
core checks what the values mean. Columns are not copied on the way in and once on the way out.
"""

from typing import Any

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ...core.index.event_feed import Event
from ...core.inspection.explain import Explanation, in_words
from ...core.values.errors import InvalidField
from ...core.values.sequence_args import Retention, SequenceArgs
from ...core.values.step_columns import StepBatch, StepReply
from ...core.values.types import MAX_ID, BlockState, Executor, Int32Array, Int64Array, SequenceId
from ...core.values.views import BlockView, PoolStats, SequenceView
from ...runtime.lease import Session

_LE32 = np.dtype("<i4")
_LE64 = np.dtype("<i8")
_EMPTY32: Int32Array = np.empty(0, _LE32)
_EMPTY64: Int64Array = np.empty(0, _LE64)
_MAX_INT32 = 2**31 - 1

EXECUTORS = {
    pb.EXECUTOR_UNSPECIFIED: Executor.CACHE,
    pb.EXECUTOR_CACHE: Executor.CACHE,
    pb.EXECUTOR_ENGINE: Executor.ENGINE,
}
_EXECUTOR_NUMBERS = {Executor.CACHE: pb.EXECUTOR_CACHE, Executor.ENGINE: pb.EXECUTOR_ENGINE}

_BLOCK_STATES: dict[BlockState, Any] = {state: pb.BlockState.Value(f"BLOCK_STATE_{state.name}") for state in BlockState}


def step_batch(request: pb.StepRequest) -> StepBatch:
    """The columns of a Step as arrays over the message's bytes. Raises InvalidField, NotImplementedYet.

    Most steps only commit and reserve, so the other lists are looked at only where one of their columns is there.
    """
    commit_ids = fork_ids = fork_children = truncate_ids = release_ids = start_ids = reserve_ids = _EMPTY64
    swap_out_ids = swap_in_ids = completed_transfers = failed_transfers = _EMPTY64
    commit_lens = commit_num_new = commit_tokens = fork_lens = truncate_lens = _EMPTY32
    start_max_new = start_max_hit = start_may_wait = reserve_min = reserve_max = _EMPTY32
    if request.commit_sequence_ids or request.commit_num_tokens or request.commit_num_new_tokens or request.commit_token_ids:
        commit_ids = _int64(request.commit_sequence_ids, "commit_sequence_ids")
        commit_lens = _int32(request.commit_num_tokens, "commit_num_tokens", len(commit_ids))
        commit_num_new = _int32(request.commit_num_new_tokens, "commit_num_new_tokens", len(commit_ids))
        tokens = request.commit_token_ids
        commit_tokens = _int32(tokens, "commit_token_ids", len(tokens) // 4)
    if request.fork_parent_ids or request.fork_child_ids or request.fork_num_tokens:
        fork_ids = _int64(request.fork_parent_ids, "fork_parent_ids")
        fork_children = _int64(request.fork_child_ids, "fork_child_ids")
        if len(fork_children) != len(fork_ids):
            raise InvalidField("columns of one list are equally long", field="fork_child_ids", limit=len(fork_ids))
        fork_lens = _int32(request.fork_num_tokens, "fork_num_tokens", len(fork_ids))
    if request.truncate_sequence_ids or request.truncate_num_tokens:
        truncate_ids = _int64(request.truncate_sequence_ids, "truncate_sequence_ids")
        truncate_lens = _int32(request.truncate_num_tokens, "truncate_num_tokens", len(truncate_ids))
    if request.release_sequence_ids:
        release_ids = _int64(request.release_sequence_ids, "release_sequence_ids")
    if request.start_sequence_ids or request.start_max_new_tokens or request.start_max_hit_tokens:
        start_ids = _int64(request.start_sequence_ids, "start_sequence_ids")
        start_max_new = _int32(request.start_max_new_tokens, "start_max_new_tokens", len(start_ids))
        start_max_hit = _int32(request.start_max_hit_tokens, "start_max_hit_tokens", len(start_ids))
        if request.start_may_wait:
            start_may_wait = _int32(request.start_may_wait, "start_may_wait", len(start_ids))
    elif request.start_may_wait:
        raise InvalidField("columns of one list are equally long", field="start_may_wait", limit=0)
    if request.reserve_sequence_ids or request.reserve_min_tokens or request.reserve_max_tokens:
        reserve_ids = _int64(request.reserve_sequence_ids, "reserve_sequence_ids")
        reserve_min = _int32(request.reserve_min_tokens, "reserve_min_tokens", len(reserve_ids))
        reserve_max = _int32(request.reserve_max_tokens, "reserve_max_tokens", len(reserve_ids))
    if request.swap_out_sequence_ids or request.swap_in_sequence_ids:
        swap_out_ids = _int64(request.swap_out_sequence_ids, "swap_out_sequence_ids")
        swap_in_ids = _int64(request.swap_in_sequence_ids, "swap_in_sequence_ids")
    if request.completed_transfer_ids or request.failed_transfer_ids:
        completed_transfers, failed_transfers = transfer_report(request)
    return StepBatch(
        request.step_id,
        request.completed_step_id,
        commit_ids,
        commit_lens,
        commit_num_new,
        commit_tokens,
        fork_ids,
        fork_children,
        fork_lens,
        truncate_ids,
        truncate_lens,
        release_ids,
        start_ids,
        start_max_new,
        start_max_hit,
        reserve_ids,
        reserve_min,
        reserve_max,
        completed_transfers,
        failed_transfers,
        swap_out_ids,
        swap_in_ids,
        start_may_wait=start_may_wait,
    )


def step_response(reply: StepReply, step_id: int, epoch: int, executor: Executor) -> bytes:
    """The StepResponse that answers a Step, as the bytes that every repeat of it gets. Orders are told to whom runs them."""
    response = pb.StepResponse(
        step_id=step_id,
        epoch=epoch,
        revision=reply.revision,
        reserve_num_reserved_tokens=reply.reserve_reserved.tobytes(),
        num_free_blocks=reply.num_free,
        num_evictable_blocks=reply.num_evictable,
        num_fenced_blocks=reply.num_fenced,
        pressure=reply.pressure,  # type: ignore[arg-type]  # the numbers are the protocol's
        num_give_back_blocks=reply.num_give_back,
    )
    if len(reply.new_block_ids):
        response.new_block_item_idx = reply.new_block_item_idx.tobytes()
        response.new_block_ids = reply.new_block_ids.tobytes()
    if len(reply.fork_results):
        response.fork_results = reply.fork_results.tobytes()
    if len(reply.start_results):
        response.start_results = reply.start_results.tobytes()
        response.start_num_hit_tokens = reply.start_hits.tobytes()
        response.start_num_reserved_tokens = reply.start_reserved.tobytes()
        response.start_num_blocks = reply.start_num_blocks.tobytes()
        response.start_block_ids = reply.start_block_ids.tobytes()
        response.start_has_logits = reply.start_has_logits.tobytes()
    if len(reply.update_ids):
        response.table_update_sequence_ids = reply.update_ids.tobytes()
        response.table_update_table_idx = reply.update_table_idx.tobytes()
        response.table_update_block_ids = reply.update_block_ids.tobytes()
    if len(reply.copy_sources):
        response.copy_source_block_ids = reply.copy_sources.tobytes()
        response.copy_destination_block_ids = reply.copy_destinations.tobytes()
    if len(reply.swap_out_results):
        response.swap_out_results = reply.swap_out_results.tobytes()
    if len(reply.swap_in_results):
        response.swap_in_results = reply.swap_in_results.tobytes()
    if len(reply.transfer_ids) and executor is Executor.ENGINE:
        response.transfer_ids = reply.transfer_ids.tobytes()
        response.transfer_kinds = reply.transfer_kinds.tobytes()
        response.transfer_source_block_ids = reply.transfer_sources.tobytes()
        response.transfer_destination_block_ids = reply.transfer_destinations.tobytes()
    if len(reply.ready_ids):
        response.ready_sequence_ids = reply.ready_ids.tobytes()
        response.ready_num_hit_tokens = reply.ready_hits.tobytes()
        response.ready_num_reserved_tokens = reply.ready_reserved.tobytes()
        response.ready_num_blocks = reply.ready_num_blocks.tobytes()
        response.ready_block_ids = reply.ready_block_ids.tobytes()
    return response.SerializeToString()


def transfer_report(request: pb.StepRequest | pb.RenewSessionRequest) -> tuple[Int64Array, Int64Array]:
    """Ids of orders that are completed, and of those that failed. Raises InvalidField."""
    completed = _int64(request.completed_transfer_ids, "completed_transfer_ids")
    return completed, _int64(request.failed_transfer_ids, "failed_transfer_ids")


def sequence_args(request: pb.CreateSequenceRequest) -> SequenceArgs:
    """Raises InvalidField."""
    if bool(request.token_ids) == bool(request.packed_token_ids):
        raise InvalidField("one of token_ids and packed_token_ids, with 1 token or more", field="token_ids", limit=1)
    check_range("priority", request.priority, -1000, 1000)
    check_range("max_tokens", request.max_tokens, 0, _MAX_INT32)
    check_range("start_number", request.start_number, 0, MAX_ID)
    if request.packed_token_ids:
        tokens = _int32(request.packed_token_ids, "packed_token_ids", len(request.packed_token_ids) // 4)
        if tokens.min() < 0:
            raise InvalidField("token ids are below 2^31", field="packed_token_ids", limit=_MAX_INT32)
    else:
        tokens = token_ids(request.token_ids)
    return SequenceArgs(
        sequence_id(request.sequence_id),
        tokens,
        request.max_tokens,
        tenant(request.tenant),
        request.priority,
        retention(request),
        request.start_number,
    )


def retention(
    request: pb.CreateSequenceRequest | pb.UpdateSequenceRequest | pb.CheckAdmissionRequest,
) -> Retention | None:
    """None where the field is absent. Raises InvalidField."""
    if not request.HasField("retention"):
        return None
    sink, window = request.retention.num_sink_tokens, request.retention.num_window_tokens
    check_range("retention.num_sink_tokens", sink, 0, _MAX_INT32)
    check_range("retention.num_window_tokens", window, 1, _MAX_INT32)
    return Retention(sink, window)


def sequence_id(value: int, field: str = "sequence_id") -> SequenceId:
    """Raises InvalidField."""
    check_range(field, value, 1, MAX_ID)
    return SequenceId(value)


def token_ids(values: object, *, at_least: int = 1) -> Int32Array:
    """A repeated uint32 field as an array. Raises InvalidField."""
    tokens = np.array(values, np.int64)
    if len(tokens) < at_least:
        raise InvalidField(f"{at_least} tokens or more", field="token_ids", limit=at_least)
    if len(tokens) and tokens.max() > _MAX_INT32:
        raise InvalidField("token ids are below 2^31", field="token_ids", limit=_MAX_INT32)
    return tokens.astype(_LE32)


def tenant(value: str) -> str:
    """Raises InvalidField."""
    check_text("tenant", value, 64)
    return value


def check_range(field: str, value: float, low: int, high: int) -> None:
    """Raises InvalidField; its limit is the bound that was passed."""
    if not low <= value <= high:
        raise InvalidField(f"{field} is {low} to {high}", field=field, limit=low if value < low else high)


def check_text(field: str, value: str, longest: int, shortest: int = 0) -> None:
    """Raises InvalidField."""
    if not shortest <= len(value) <= longest:
        raise InvalidField(f"{field} has {shortest} to {longest} characters", field=field, limit=longest)


def victim_policy(number: int) -> str:
    """The policy's name. Raises InvalidField."""
    if number not in pb.VictimPolicy.values():
        raise InvalidField("a policy of VictimPolicy is wanted", field="policy", limit=max(pb.VictimPolicy.values()))
    return pb.VictimPolicy.Name(number or pb.VICTIM_POLICY_PRIORITY).removeprefix("VICTIM_POLICY_").lower()


def check_one_target(request: pb.EvictBlocksRequest | pb.SelectVictimsRequest) -> None:
    """At most one of the ways to say how much should come free. Raises InvalidField."""
    names = ("num_free_blocks", "num_blocks") if isinstance(request, pb.EvictBlocksRequest) else ("num_blocks",)
    for name in names:
        check_range(name, getattr(request, name), 0, _MAX_INT32)
    if request.HasField("max_utilization"):
        check_range("max_utilization", request.max_utilization, 0, 1)
    if sum(bool(getattr(request, name)) for name in names) + request.HasField("max_utilization") > 1:
        raise InvalidField(f"one of {', '.join(names)} and max_utilization", field=names[-1])


def sequence_info(view: SequenceView, *, with_table: bool = True, tokens: Int32Array = _EMPTY32) -> pb.SequenceInfo:
    """A sequence as people see it."""
    retention = None
    if view.retention is not None:
        sink, window = view.retention.num_sink_tokens, view.retention.num_window_tokens
        retention = pb.Retention(num_sink_tokens=sink, num_window_tokens=window)
    return pb.SequenceInfo(
        sequence_id=view.sequence_id,
        session_id=view.session_id,
        state=int(view.state),  # type: ignore[arg-type]  # the numbers are the protocol's
        num_tokens=view.num_tokens,
        num_committed_tokens=view.num_committed_tokens,
        num_reserved_tokens=view.num_reserved_tokens,
        max_tokens=view.max_tokens,
        priority=view.priority,
        num_hit_tokens=view.num_hit_tokens,
        block_table=view.block_table.tolist() if with_table else (),
        token_ids=tokens.tolist(),
        num_accesses=view.num_accesses,
        num_host_blocks=view.num_host_blocks,
        retention=retention,
        idle_ms=round(view.idle_seconds * 1000),
        start_number=view.start_number,
    )


def explanation(found: Explanation) -> pb.ExplainMatchResponse:
    """In numbers and in words."""
    return pb.ExplainMatchResponse(
        num_matched_tokens=found.num_matched,
        explanation=in_words(found),
        end=int(found.end),  # type: ignore[arg-type]  # the numbers are the protocol's
        num_host_tokens=found.num_host,
        num_hit_tokens=found.num_hit,
        num_common_tokens=found.num_common,
        ended_ms_ago=max(1, round(found.seconds_ago * 1000)) if found.seconds_ago is not None else 0,
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
    )


def block_info(view: BlockView) -> pb.GetBlockResponse:
    """A block as people see it."""
    return pb.GetBlockResponse(
        state=_BLOCK_STATES[view.state],
        num_references=view.num_references,
        num_fences=view.num_fences,
        num_transfers=view.num_transfers,
        num_quarantines=view.num_quarantines,
        indexed=view.indexed,
        has_host_copy=view.has_host_copy,
    )


def pool_stats(stats: PoolStats, info: pb.PoolInfo) -> pb.PoolStats:
    """Field names are the same on both sides; only bytes are not the core's to know."""
    values = {name: getattr(stats, name) for name in PoolStats.__slots__}
    num_used = info.num_blocks - 1 - stats.num_free_blocks - stats.num_cached_blocks
    return pb.PoolStats(
        pool=info,
        used_bytes=num_used * info.block_bytes,
        peak_used_bytes=stats.peak_used_blocks * info.block_bytes,
        **values,
    )


def session_info(session: Session, now: float, num_sequences: int, num_processes: int) -> pb.SessionInfo:
    """A session as people see it; ids of other sessions are no secret while there is only one role."""
    return pb.SessionInfo(
        session_id=session.id,
        client_name=session.client_name,
        executor=_EXECUTOR_NUMBERS[session.executor],
        step_id=session.step_id,
        completed_step_id=session.completed_step_id,
        num_sequences=num_sequences,
        lease_left_ms=max(0, round((session.deadline - now) * 1000)),
        num_attached_processes=num_processes,
    )


def _int64(raw: bytes, field: str) -> Int64Array:
    if not raw:
        return _EMPTY64
    if len(raw) % 8:
        raise InvalidField("the column holds 8 bytes an item", field=field)
    return np.frombuffer(raw, _LE64)


def _int32(raw: bytes, field: str, count: int) -> Int32Array:
    if len(raw) != 4 * count:
        raise InvalidField(f"the column holds 4 bytes an item and {count} items", field=field, limit=count)
    return np.frombuffer(raw, _LE32) if raw else _EMPTY32
