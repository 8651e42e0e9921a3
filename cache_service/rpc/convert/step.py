"""The columns of a Step: a StepRequest to a StepBatch, and a StepReply to the bytes of a StepResponse.

Columns are not copied on the way in, and once on the way out. This is the hot path of a step.
"""

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ...core.values.errors import InvalidField
from ...core.values.step_columns import StepBatch, StepReply
from ...core.values.types import NO_INT32, NO_INT64, Executor, Int32Array, Int64Array

_LE32 = np.dtype("<i4")
_LE64 = np.dtype("<i8")


def step_batch(request: pb.StepRequest) -> StepBatch:
    """The columns of a Step as arrays over the message's bytes. Raises InvalidField, NotImplementedYet.

    Most steps only commit and reserve, so the other lists are looked at only where one of their columns is there.
    """
    commit_ids = fork_ids = fork_children = truncate_ids = release_ids = start_ids = reserve_ids = NO_INT64
    swap_out_ids = swap_in_ids = completed_transfers = failed_transfers = NO_INT64
    commit_lens = commit_num_new = commit_tokens = fork_lens = truncate_lens = NO_INT32
    start_max_new = start_max_hit = start_may_wait = reserve_min = reserve_max = NO_INT32
    if request.commit_sequence_ids or request.commit_num_tokens or request.commit_num_new_tokens or request.commit_token_ids:
        commit_ids = _int64_column(request.commit_sequence_ids, "commit_sequence_ids")
        commit_lens = int32_column(request.commit_num_tokens, "commit_num_tokens", len(commit_ids))
        commit_num_new = int32_column(request.commit_num_new_tokens, "commit_num_new_tokens", len(commit_ids))
        tokens = request.commit_token_ids
        commit_tokens = int32_column(tokens, "commit_token_ids", len(tokens) // 4)
    if request.fork_parent_ids or request.fork_child_ids or request.fork_num_tokens:
        fork_ids = _int64_column(request.fork_parent_ids, "fork_parent_ids")
        fork_children = _int64_column(request.fork_child_ids, "fork_child_ids")
        if len(fork_children) != len(fork_ids):
            raise InvalidField("columns of one list are equally long", field="fork_child_ids", limit=len(fork_ids))
        fork_lens = int32_column(request.fork_num_tokens, "fork_num_tokens", len(fork_ids))
    if request.truncate_sequence_ids or request.truncate_num_tokens:
        truncate_ids = _int64_column(request.truncate_sequence_ids, "truncate_sequence_ids")
        truncate_lens = int32_column(request.truncate_num_tokens, "truncate_num_tokens", len(truncate_ids))
    if request.release_sequence_ids:
        release_ids = _int64_column(request.release_sequence_ids, "release_sequence_ids")
    if request.start_sequence_ids or request.start_max_new_tokens or request.start_max_hit_tokens:
        start_ids = _int64_column(request.start_sequence_ids, "start_sequence_ids")
        start_max_new = int32_column(request.start_max_new_tokens, "start_max_new_tokens", len(start_ids))
        start_max_hit = int32_column(request.start_max_hit_tokens, "start_max_hit_tokens", len(start_ids))
        if request.start_may_wait:
            start_may_wait = int32_column(request.start_may_wait, "start_may_wait", len(start_ids))
    elif request.start_may_wait:
        raise InvalidField("columns of one list are equally long", field="start_may_wait", limit=0)
    if request.reserve_sequence_ids or request.reserve_min_tokens or request.reserve_max_tokens:
        reserve_ids = _int64_column(request.reserve_sequence_ids, "reserve_sequence_ids")
        reserve_min = int32_column(request.reserve_min_tokens, "reserve_min_tokens", len(reserve_ids))
        reserve_max = int32_column(request.reserve_max_tokens, "reserve_max_tokens", len(reserve_ids))
    if request.swap_out_sequence_ids or request.swap_in_sequence_ids:
        swap_out_ids = _int64_column(request.swap_out_sequence_ids, "swap_out_sequence_ids")
        swap_in_ids = _int64_column(request.swap_in_sequence_ids, "swap_in_sequence_ids")
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
    completed = _int64_column(request.completed_transfer_ids, "completed_transfer_ids")
    return completed, _int64_column(request.failed_transfer_ids, "failed_transfer_ids")


def _int64_column(raw: bytes, field: str) -> Int64Array:
    if not raw:
        return NO_INT64
    if len(raw) % 8:
        raise InvalidField("the column holds 8 bytes an item", field=field)
    return np.frombuffer(raw, _LE64)


def int32_column(raw: bytes, field: str, count: int) -> Int32Array:
    if len(raw) != 4 * count:
        raise InvalidField(f"the column holds 4 bytes an item and {count} items", field=field, limit=count)
    return np.frombuffer(raw, _LE32) if raw else NO_INT32
