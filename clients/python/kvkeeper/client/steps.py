"""Columns of a Step and of its answer: numpy on this side, bytes of little-endian integers on the wire.

This is the hot path: one encode and one decode per engine iteration, a fixed number of numpy calls whatever the number
of sequences. Decoded arrays are read-only views of the received message.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeeper.cache.v1 import cache_service_pb2 as pb

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")
_EMPTY32 = np.empty(0, _INT32)
_EMPTY64 = np.empty(0, _INT64)
_EMPTY32.flags.writeable = False
_EMPTY64.flags.writeable = False


def _none32() -> Int32Array:
    return _EMPTY32


def _none64() -> Int64Array:
    return _EMPTY64


@dataclass(frozen=True, slots=True)
class StepItems:
    """The items of one step, applied in this order. Columns of one group are equally long; lengths are absolute."""

    commit_ids: Int64Array = field(default_factory=_none64)
    commit_lens: Int32Array = field(default_factory=_none32)
    commit_num_new: Int32Array = field(default_factory=_none32)  # how many of commit_tokens belong to the item
    commit_tokens: Int32Array = field(default_factory=_none32)  # concatenated
    fork_parents: Int64Array = field(default_factory=_none64)
    fork_children: Int64Array = field(default_factory=_none64)
    fork_lens: Int32Array = field(default_factory=_none32)
    truncate_ids: Int64Array = field(default_factory=_none64)
    truncate_lens: Int32Array = field(default_factory=_none32)
    release_ids: Int64Array = field(default_factory=_none64)
    start_ids: Int64Array = field(default_factory=_none64)
    start_max_new: Int32Array = field(default_factory=_none32)
    start_max_hit: Int32Array = field(default_factory=_none32)  # 0: no look-up
    start_may_wait: Int32Array = field(default_factory=_none32)  # 1 where the answer COMPUTING is allowed; empty: nowhere
    reserve_ids: Int64Array = field(default_factory=_none64)
    reserve_min: Int32Array = field(default_factory=_none32)
    reserve_max: Int32Array = field(default_factory=_none32)
    swap_out_ids: Int64Array = field(default_factory=_none64)  # applied before the starts
    swap_in_ids: Int64Array = field(default_factory=_none64)
    completed_transfers: Int64Array = field(default_factory=_none64)  # applied first
    failed_transfers: Int64Array = field(default_factory=_none64)


class StepResult(NamedTuple):
    """The answer to a step, items in the order of the request. The protocol's StepResponse explains each field.

    A named tuple: a frozen dataclass of so many fields takes four times as long to make.
    """

    step_id: int
    fork_results: Int32Array  # of ItemResult
    start_results: Int32Array  # of StartResult
    start_hits: Int32Array
    start_reserved: Int32Array
    start_num_blocks: Int32Array
    start_block_ids: Int32Array  # block tables of the starts, concatenated
    start_has_logits: Int32Array  # 1 where the whole prompt is a hit and read_logits has what follows; empty: nowhere
    reserve_reserved: Int32Array
    new_block_item_idx: Int32Array  # index of the reservation, ascending
    new_block_ids: Int32Array
    update_ids: Int64Array
    update_table_idx: Int32Array
    update_block_ids: Int32Array
    copy_sources: Int32Array
    copy_destinations: Int32Array
    num_free: int
    num_evictable: int
    num_fenced: int
    num_reclaim_hint: int  # blocks still missing for the oldest claim, where this session runs younger sequences
    pressure: int  # of PressureLevel
    revision: int
    swap_out_results: Int32Array = _EMPTY32  # of ItemResult
    swap_in_results: Int32Array = _EMPTY32
    transfer_ids: Int64Array = _EMPTY64  # to be run in order, before the copies, and reported by these ids
    transfer_kinds: Int32Array = _EMPTY32  # of TransferKind
    transfer_sources: Int32Array = _EMPTY32
    transfer_destinations: Int32Array = _EMPTY32
    ready_ids: Int64Array = _EMPTY64  # sequences that were loading and run now
    ready_hits: Int32Array = _EMPTY32
    ready_reserved: Int32Array = _EMPTY32
    ready_num_blocks: Int32Array = _EMPTY32
    ready_block_ids: Int32Array = _EMPTY32  # their block tables, concatenated


# (field of StepItems, field of StepRequest, dtype)
_REQUEST_COLUMNS = (
    ("commit_ids", "commit_sequence_ids", _INT64),
    ("commit_lens", "commit_num_tokens", _INT32),
    ("commit_num_new", "commit_num_new_tokens", _INT32),
    ("commit_tokens", "commit_token_ids", _INT32),
    ("fork_parents", "fork_parent_ids", _INT64),
    ("fork_children", "fork_child_ids", _INT64),
    ("fork_lens", "fork_num_tokens", _INT32),
    ("truncate_ids", "truncate_sequence_ids", _INT64),
    ("truncate_lens", "truncate_num_tokens", _INT32),
    ("release_ids", "release_sequence_ids", _INT64),
    ("start_ids", "start_sequence_ids", _INT64),
    ("start_max_new", "start_max_new_tokens", _INT32),
    ("start_max_hit", "start_max_hit_tokens", _INT32),
    ("start_may_wait", "start_may_wait", _INT32),
    ("reserve_ids", "reserve_sequence_ids", _INT64),
    ("reserve_min", "reserve_min_tokens", _INT32),
    ("reserve_max", "reserve_max_tokens", _INT32),
    ("swap_out_ids", "swap_out_sequence_ids", _INT64),
    ("swap_in_ids", "swap_in_sequence_ids", _INT64),
    ("completed_transfers", "completed_transfer_ids", _INT64),
    ("failed_transfers", "failed_transfer_ids", _INT64),
)


def encode(items: StepItems, session_id: str, epoch: int, step_id: int, completed_step_id: int, traceparent: str = "") -> bytes:
    """The serialised StepRequest. Raises TypeError for a column that is not one-dimensional of its exact dtype."""
    request = pb.StepRequest(session_id=session_id, epoch=epoch, step_id=step_id, completed_step_id=completed_step_id)
    for name, wire_name, dtype in _REQUEST_COLUMNS:
        column = getattr(items, name)
        if column is _EMPTY32 or column is _EMPTY64:  # most columns of most steps
            continue
        if column.dtype != dtype or column.ndim != 1:
            # A silent cast would hide a truncated id; a wrong width would be read as other numbers.
            raise TypeError(f"{name} must be a one-dimensional array of {dtype}, got {column.ndim}-d {column.dtype}")
        if column.size:
            setattr(request, wire_name, column.tobytes())
    if traceparent:
        request.traceparent = traceparent
    return request.SerializeToString()


def decode(raw: bytes) -> StepResult:
    """The columns of a serialised StepResponse. Raises ValueError for a column whose size is not that of whole items."""
    response = pb.StepResponse.FromString(raw)
    result = _decode_common(response)
    if response.transfer_ids or response.ready_sequence_ids or response.swap_out_results or response.swap_in_results:
        result = _with_moves(result, response)
    return result


def _with_moves(result: StepResult, response: pb.StepResponse) -> StepResult:
    """Adds the columns that few steps have: swaps, transfer orders, sequences that were loading."""
    return result._replace(
        swap_out_results=_column32(response.swap_out_results),
        swap_in_results=_column32(response.swap_in_results),
        transfer_ids=_column64(response.transfer_ids),
        transfer_kinds=_column32(response.transfer_kinds),
        transfer_sources=_column32(response.transfer_source_block_ids),
        transfer_destinations=_column32(response.transfer_destination_block_ids),
        ready_ids=_column64(response.ready_sequence_ids),
        ready_hits=_column32(response.ready_num_hit_tokens),
        ready_reserved=_column32(response.ready_num_reserved_tokens),
        ready_num_blocks=_column32(response.ready_num_blocks),
        ready_block_ids=_column32(response.ready_block_ids),
    )


def _decode_common(response: pb.StepResponse) -> StepResult:
    return StepResult(
        step_id=response.step_id,
        fork_results=_column32(response.fork_results),
        start_results=_column32(response.start_results),
        start_hits=_column32(response.start_num_hit_tokens),
        start_reserved=_column32(response.start_num_reserved_tokens),
        start_num_blocks=_column32(response.start_num_blocks),
        start_block_ids=_column32(response.start_block_ids),
        start_has_logits=_column32(response.start_has_logits),
        reserve_reserved=_column32(response.reserve_num_reserved_tokens),
        new_block_item_idx=_column32(response.new_block_item_idx),
        new_block_ids=_column32(response.new_block_ids),
        update_ids=_column64(response.table_update_sequence_ids),
        update_table_idx=_column32(response.table_update_table_idx),
        update_block_ids=_column32(response.table_update_block_ids),
        copy_sources=_column32(response.copy_source_block_ids),
        copy_destinations=_column32(response.copy_destination_block_ids),
        num_free=response.num_free_blocks,
        num_evictable=response.num_evictable_blocks,
        num_fenced=response.num_fenced_blocks,
        num_reclaim_hint=response.num_reclaim_hint_blocks,
        pressure=response.pressure,
        revision=response.revision,
    )


def _column32(data: bytes) -> Int32Array:
    return np.frombuffer(data, _INT32) if data else _EMPTY32


def _column64(raw: bytes) -> Int64Array:
    return np.frombuffer(raw, _INT64) if raw else _EMPTY64
