"""Columns of a Step and of its answer: numpy on this side, bytes of little-endian integers on the wire.

This is the hot path: one encode and one decode per engine iteration, a fixed number of numpy calls whatever the number
of sequences. Decoded arrays are read-only views of the received message.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

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

    Forks, truncates, releases, swaps and starts are at most max_step_items of the session's pool, all together. Each column is
    declared with its field of StepRequest, as those of StepResult are with theirs of StepResponse.
    """

    commit_ids: Annotated[Int64Array, "commit_sequence_ids"] = field(default_factory=_none64)
    commit_lens: Annotated[Int32Array, "commit_num_tokens"] = field(default_factory=_none32)
    # How many of commit_tokens belong to the item.
    commit_num_new: Annotated[Int32Array, "commit_num_new_tokens"] = field(default_factory=_none32)
    commit_tokens: Annotated[Int32Array, "commit_token_ids"] = field(default_factory=_none32)  # concatenated
    fork_parents: Annotated[Int64Array, "fork_parent_ids"] = field(default_factory=_none64)
    fork_children: Annotated[Int64Array, "fork_child_ids"] = field(default_factory=_none64)
    fork_lens: Annotated[Int32Array, "fork_num_tokens"] = field(default_factory=_none32)
    truncate_ids: Annotated[Int64Array, "truncate_sequence_ids"] = field(default_factory=_none64)
    truncate_lens: Annotated[Int32Array, "truncate_num_tokens"] = field(default_factory=_none32)
    release_ids: Annotated[Int64Array, "release_sequence_ids"] = field(default_factory=_none64)
    start_ids: Annotated[Int64Array, "start_sequence_ids"] = field(default_factory=_none64)
    start_max_new: Annotated[Int32Array, "start_max_new_tokens"] = field(default_factory=_none32)
    start_max_hit: Annotated[Int32Array, "start_max_hit_tokens"] = field(default_factory=_none32)  # 0: no look-up
    # 1 where the answer COMPUTING is allowed; empty: nowhere.
    start_may_wait: Annotated[Int32Array, "start_may_wait"] = field(default_factory=_none32)
    reserve_ids: Annotated[Int64Array, "reserve_sequence_ids"] = field(default_factory=_none64)
    reserve_min: Annotated[Int32Array, "reserve_min_tokens"] = field(default_factory=_none32)
    reserve_max: Annotated[Int32Array, "reserve_max_tokens"] = field(default_factory=_none32)
    swap_out_ids: Annotated[Int64Array, "swap_out_sequence_ids"] = field(default_factory=_none64)  # applied before the starts
    swap_in_ids: Annotated[Int64Array, "swap_in_sequence_ids"] = field(default_factory=_none64)
    completed_transfers: Annotated[Int64Array, "completed_transfer_ids"] = field(default_factory=_none64)  # applied first
    failed_transfers: Annotated[Int64Array, "failed_transfer_ids"] = field(default_factory=_none64)


class StepResult(NamedTuple):
    """The answer to a step, items in the order of the request. The protocol's StepResponse explains each field.

    A named tuple: a frozen dataclass of so many fields takes four times as long to make.
    """

    step_id: Annotated[int, "step_id"]
    fork_results: Annotated[Int32Array, "fork_results"]  # of ItemResult
    start_results: Annotated[Int32Array, "start_results"]  # of StartResult
    start_hits: Annotated[Int32Array, "start_num_hit_tokens"]
    start_reserved: Annotated[Int32Array, "start_num_reserved_tokens"]
    start_num_blocks: Annotated[Int32Array, "start_num_blocks"]
    start_block_ids: Annotated[Int32Array, "start_block_ids"]  # block tables of the starts, concatenated
    # 1 where the whole prompt is a hit and read_logits has what follows; empty: nowhere.
    start_has_logits: Annotated[Int32Array, "start_has_logits"]
    reserve_reserved: Annotated[Int32Array, "reserve_num_reserved_tokens"]
    new_block_item_idx: Annotated[Int32Array, "new_block_item_idx"]  # index of the reservation, ascending
    new_block_ids: Annotated[Int32Array, "new_block_ids"]
    update_ids: Annotated[Int64Array, "table_update_sequence_ids"]
    update_table_idx: Annotated[Int32Array, "table_update_table_idx"]
    update_block_ids: Annotated[Int32Array, "table_update_block_ids"]
    copy_sources: Annotated[Int32Array, "copy_source_block_ids"]
    copy_destinations: Annotated[Int32Array, "copy_destination_block_ids"]
    num_free: Annotated[int, "num_free_blocks"]
    num_evictable: Annotated[int, "num_evictable_blocks"]
    num_fenced: Annotated[int, "num_fenced_blocks"]
    # Blocks still missing for the oldest claim, where this session runs younger sequences.
    num_reclaim_hint: Annotated[int, "num_reclaim_hint_blocks"]
    pressure: Annotated[int, "pressure"]  # of PressureLevel
    revision: Annotated[int, "revision"]
    swap_out_results: Annotated[Int32Array, "swap_out_results"] = _EMPTY32  # of ItemResult
    swap_in_results: Annotated[Int32Array, "swap_in_results"] = _EMPTY32
    # Orders, to be run in order, before the copies, and reported by these ids.
    transfer_ids: Annotated[Int64Array, "transfer_ids"] = _EMPTY64
    transfer_kinds: Annotated[Int32Array, "transfer_kinds"] = _EMPTY32  # of TransferKind
    transfer_sources: Annotated[Int32Array, "transfer_source_block_ids"] = _EMPTY32
    transfer_destinations: Annotated[Int32Array, "transfer_destination_block_ids"] = _EMPTY32
    ready_ids: Annotated[Int64Array, "ready_sequence_ids"] = _EMPTY64  # sequences that were loading and run now
    ready_hits: Annotated[Int32Array, "ready_num_hit_tokens"] = _EMPTY32
    ready_reserved: Annotated[Int32Array, "ready_num_reserved_tokens"] = _EMPTY32
    ready_num_blocks: Annotated[Int32Array, "ready_num_blocks"] = _EMPTY32
    ready_block_ids: Annotated[Int32Array, "ready_block_ids"] = _EMPTY32  # their block tables, concatenated
    # With groups of layers: the one whose table a block or an update belongs to.
    new_block_groups: Annotated[Int32Array, "new_block_group_idx"] = _EMPTY32
    update_groups: Annotated[Int32Array, "table_update_group_idx"] = _EMPTY32
    # With layers of states: committed lengths, one per fork and one per truncate.
    fork_committed: Annotated[Int32Array, "fork_num_committed_tokens"] = _EMPTY32
    truncate_committed: Annotated[Int32Array, "truncate_num_committed_tokens"] = _EMPTY32


def _marks(values: type) -> list[tuple[str, str, np.dtype[Any] | None]]:
    """(name, field of the message, dtype or None of a number) of all that is declared in StepItems or StepResult."""
    dtypes: list[tuple[Any, np.dtype[Any] | None]] = [(Int64Array, _INT64), (Int32Array, _INT32), (int, None)]
    hints = ((name, *get_args(hint)) for name, hint in get_type_hints(values, include_extras=True).items())
    return [(name, mark, next(dtype for type_, dtype in dtypes if type_ == hint)) for name, hint, mark in hints]


_REQUEST_COLUMNS = tuple((name, mark, dtype) for name, mark, dtype in _marks(StepItems) if dtype is not None)

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

# Of an answer: for each field's number its place in StepResult and its dtype, and what stands in the places without a field.
_ANSWER_FIELDS = pb.StepResponse.DESCRIPTOR.fields_by_name
_PLACES = {_ANSWER_FIELDS[field].number: (place, dtype) for place, (_, field, dtype) in enumerate(_marks(StepResult))}
_EMPTY_OF = {None: 0, _INT32: _EMPTY32, _INT64: _EMPTY64}
_NO_VALUES: list[Any] = [_EMPTY_OF[dtype] for _, dtype in _PLACES.values()]


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
    values = _NO_VALUES.copy()
    for wire_field, value in pb.StepResponse.FromString(raw).ListFields():
        if wire_field.number in _PLACES:  # the epoch is the session's
            place, dtype = _PLACES[wire_field.number]
            values[place] = value if dtype is None else np.frombuffer(value, dtype)
    return StepResult._make(values)
