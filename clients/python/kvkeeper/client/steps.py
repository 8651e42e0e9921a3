"""Columns of a Step and of its answer: numpy on this side, bytes of little-endian integers on the wire.

This is the hot path: one encode and one decode per engine iteration, a fixed number of numpy calls whatever the number
of sequences. Decoded arrays are read-only views of the received message.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

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
    """The items of one step, applied in this order. Columns of one group are equally long; lengths are absolute.

    Forks, truncates, releases, swaps and starts are at most max_step_items of the session's pool, all together.
    """

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
    new_block_groups: Int32Array = _EMPTY32  # with groups of layers: the one whose table a block or an update belongs to
    update_groups: Int32Array = _EMPTY32
    fork_committed: Int32Array = _EMPTY32  # with layers of states: committed lengths, one per fork and one per truncate
    truncate_committed: Int32Array = _EMPTY32


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


# (field of StepResult, field of StepResponse, dtype)
_ANSWER_COLUMNS = (
    ("fork_results", "fork_results", _INT32),
    ("start_results", "start_results", _INT32),
    ("start_hits", "start_num_hit_tokens", _INT32),
    ("start_reserved", "start_num_reserved_tokens", _INT32),
    ("start_num_blocks", "start_num_blocks", _INT32),
    ("start_block_ids", "start_block_ids", _INT32),
    ("start_has_logits", "start_has_logits", _INT32),
    ("reserve_reserved", "reserve_num_reserved_tokens", _INT32),
    ("new_block_item_idx", "new_block_item_idx", _INT32),
    ("new_block_ids", "new_block_ids", _INT32),
    ("update_ids", "table_update_sequence_ids", _INT64),
    ("update_table_idx", "table_update_table_idx", _INT32),
    ("update_block_ids", "table_update_block_ids", _INT32),
    ("copy_sources", "copy_source_block_ids", _INT32),
    ("copy_destinations", "copy_destination_block_ids", _INT32),
    ("swap_out_results", "swap_out_results", _INT32),
    ("swap_in_results", "swap_in_results", _INT32),
    ("transfer_ids", "transfer_ids", _INT64),
    ("transfer_kinds", "transfer_kinds", _INT32),
    ("transfer_sources", "transfer_source_block_ids", _INT32),
    ("transfer_destinations", "transfer_destination_block_ids", _INT32),
    ("ready_ids", "ready_sequence_ids", _INT64),
    ("ready_hits", "ready_num_hit_tokens", _INT32),
    ("ready_reserved", "ready_num_reserved_tokens", _INT32),
    ("ready_num_blocks", "ready_num_blocks", _INT32),
    ("ready_block_ids", "ready_block_ids", _INT32),
    ("new_block_groups", "new_block_group_idx", _INT32),
    ("update_groups", "table_update_group_idx", _INT32),
    ("fork_committed", "fork_num_committed_tokens", _INT32),
    ("truncate_committed", "truncate_num_committed_tokens", _INT32),
)
_ANSWER_NUMBERS = (
    ("step_id", "step_id"),
    ("num_free", "num_free_blocks"),
    ("num_evictable", "num_evictable_blocks"),
    ("num_fenced", "num_fenced_blocks"),
    ("num_reclaim_hint", "num_reclaim_hint_blocks"),
    ("pressure", "pressure"),
    ("revision", "revision"),
)

# A StepRequest is written here byte by byte, in the order of its field numbers, as protobuf writes it: a field is its tag, its
# length or value as a varint, and its bytes. So columns that are not there cost nothing, and no message is made.
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIELDS = pb.StepRequest.DESCRIPTOR.fields_by_name


def _varint(number: int) -> bytes:
    """A number from 0 on, seven bits a byte, the lowest first."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _tag(field: str, wire_type: int) -> bytes:
    return _varint(_FIELDS[field].number << 3 | wire_type)


_STEP_ID, _COMPLETED = _tag("step_id", _VARINT), _tag("completed_step_id", _VARINT)

# The columns in the order of their fields' numbers.
_WRITTEN = sorted(_REQUEST_COLUMNS, key=lambda column: _FIELDS[column[1]].number)
_NAMES = tuple(name for name, _, _ in _WRITTEN)
_TAGS = tuple(_tag(field, _LENGTH_DELIMITED) for _, field, _ in _WRITTEN)
_REQUEST_DTYPES = tuple(dtype for _, _, dtype in _WRITTEN)
_columns_of_items = attrgetter(*_NAMES)

# Of an answer: where each column and number stands in StepResult, and what stands there without one.
_raw_columns = attrgetter(*(field for _, field, _ in _ANSWER_COLUMNS))
_raw_numbers = attrgetter(*(field for _, field in _ANSWER_NUMBERS))
_PLACES = tuple(StepResult._fields.index(name) for name, _, _ in _ANSWER_COLUMNS)
_NUMBER_PLACES = tuple(StepResult._fields.index(name) for name, _ in _ANSWER_NUMBERS)
_DTYPES = tuple(dtype for _, _, dtype in _ANSWER_COLUMNS)
_ALL_COLUMNS = range(len(_ANSWER_COLUMNS))
_EMPTY_OF = {name: _EMPTY64 if dtype == _INT64 else _EMPTY32 for name, _, dtype in _ANSWER_COLUMNS}
_NO_VALUES: list[Any] = [_EMPTY_OF.get(name, 0) for name in StepResult._fields]


@lru_cache
def _head(session_id: str, epoch: int) -> bytes:
    """The first two fields, which all steps of a session share."""
    return pb.StepRequest(session_id=session_id, epoch=epoch).SerializeToString()


@lru_cache
def _length(num_bytes: int) -> bytes:
    return _varint(num_bytes)


def encode(items: StepItems, session_id: str, epoch: int, step_id: int, completed_step_id: int, traceparent: str = "") -> bytes:
    """The serialised StepRequest. Raises TypeError for a column that is not one-dimensional of its exact dtype."""
    parts = [_head(session_id, epoch)]
    if step_id:
        parts += (_STEP_ID, _varint(step_id))
    if completed_step_id:
        parts += (_COMPLETED, _varint(completed_step_id))
    for column, name, tag, dtype in zip(_columns_of_items(items), _NAMES, _TAGS, _REQUEST_DTYPES, strict=True):
        if column is _EMPTY32 or column is _EMPTY64:  # most columns of most steps
            continue
        if (column.dtype is not dtype and column.dtype != dtype) or column.ndim != 1:
            # A silent cast would hide a truncated id; a wrong width would be read as other numbers.
            raise TypeError(f"{name} must be a one-dimensional array of {dtype}, got {column.ndim}-d {column.dtype}")
        if num_bytes := column.nbytes:
            parts += (tag, _length(num_bytes), column.tobytes())
    if traceparent:
        parts.append(pb.StepRequest(traceparent=traceparent).SerializeToString())
    return b"".join(parts)


def decode(raw: bytes) -> StepResult:
    """The columns of a serialised StepResponse. Raises ValueError for a column whose size is not that of whole items."""
    response = pb.StepResponse.FromString(raw)
    values = _NO_VALUES.copy()
    columns = _raw_columns(response)
    for at in compress(_ALL_COLUMNS, columns):
        values[_PLACES[at]] = np.frombuffer(columns[at], _DTYPES[at])
    for place, number in zip(_NUMBER_PLACES, _raw_numbers(response), strict=True):
        values[place] = number
    return StepResult._make(values)
