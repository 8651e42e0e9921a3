"""The columns of one step and of its reply, each declared once: name, width, list and field of the message.

A column is declared by its field of StepBatch or StepReply; BATCH_COLUMNS, REPLY_COLUMNS and REPLY_NUMBERS are read off those
declarations, for code that checks or converts every column. Arrays are not copied on their way through the core: a caller does
not write again to an array that it handed over.
"""

from enum import Enum
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

from .types import NO_INT32, NO_INT64, Int32Array, Int64Array, PressureLevel


class Length(Enum):
    """How long a column is."""

    LIST = "one entry per item; the first column of its list, so it says how many items there are"
    ITEM = "one entry per item"
    OPTIONAL = "one entry per item, or empty"
    JOINED = "the entries of all items, concatenated"


class In(NamedTuple):
    """Where a column stands: its list, the bytes field of the protocol's message, and its length."""

    list: str
    field: str
    length: Length = Length.ITEM


class Column(NamedTuple):
    """One column, as BATCH_COLUMNS and REPLY_COLUMNS show it. dtype is that of the wire."""

    name: str
    dtype: np.dtype[Any]
    list: str
    field: str
    length: Length


class StepBatch(NamedTuple):
    """The items of one Step as columns, in lists of equally long ones; fields are those of the protocol's StepRequest.

    A named tuple, as is the reply: a frozen dataclass of so many fields takes four times as long to make.
    """

    step_id: int
    completed_step_id: int
    commit_ids: Annotated[Int64Array, In("commit", "commit_sequence_ids", Length.LIST)] = NO_INT64
    commit_lens: Annotated[Int32Array, In("commit", "commit_num_tokens")] = NO_INT32  # absolute
    commit_num_new: Annotated[Int32Array, In("commit", "commit_num_new_tokens")] = NO_INT32
    commit_tokens: Annotated[Int32Array, In("commit", "commit_token_ids", Length.JOINED)] = NO_INT32
    fork_parents: Annotated[Int64Array, In("fork", "fork_parent_ids", Length.LIST)] = NO_INT64
    fork_children: Annotated[Int64Array, In("fork", "fork_child_ids")] = NO_INT64
    fork_lens: Annotated[Int32Array, In("fork", "fork_num_tokens")] = NO_INT32
    truncate_ids: Annotated[Int64Array, In("truncate", "truncate_sequence_ids", Length.LIST)] = NO_INT64
    truncate_lens: Annotated[Int32Array, In("truncate", "truncate_num_tokens")] = NO_INT32
    release_ids: Annotated[Int64Array, In("release", "release_sequence_ids", Length.LIST)] = NO_INT64
    start_ids: Annotated[Int64Array, In("start", "start_sequence_ids", Length.LIST)] = NO_INT64
    start_max_new: Annotated[Int32Array, In("start", "start_max_new_tokens")] = NO_INT32
    start_max_hit: Annotated[Int32Array, In("start", "start_max_hit_tokens")] = NO_INT32
    reserve_ids: Annotated[Int64Array, In("reserve", "reserve_sequence_ids", Length.LIST)] = NO_INT64
    reserve_min: Annotated[Int32Array, In("reserve", "reserve_min_tokens")] = NO_INT32
    reserve_max: Annotated[Int32Array, In("reserve", "reserve_max_tokens")] = NO_INT32
    completed_transfers: Annotated[Int64Array, In("completed", "completed_transfer_ids", Length.LIST)] = NO_INT64
    failed_transfers: Annotated[Int64Array, In("failed", "failed_transfer_ids", Length.LIST)] = NO_INT64
    swap_out_ids: Annotated[Int64Array, In("swap_out", "swap_out_sequence_ids", Length.LIST)] = NO_INT64
    swap_in_ids: Annotated[Int64Array, In("swap_in", "swap_in_sequence_ids", Length.LIST)] = NO_INT64
    start_may_wait: Annotated[Int32Array, In("start", "start_may_wait", Length.OPTIONAL)] = NO_INT32  # empty: no start may wait
    # No column of the protocol: the slots, all or none, that the start of a one-item call is granted. Empty in other steps.
    start_exact: Int32Array = NO_INT32


class StepReply(NamedTuple):
    """The answer to a Step, as columns and numbers; fields are those of the protocol's StepResponse."""

    fork_results: Annotated[Int32Array, In("fork", "fork_results", Length.LIST)]
    start_results: Annotated[Int32Array, In("start", "start_results", Length.LIST)]
    start_hits: Annotated[Int32Array, In("start", "start_num_hit_tokens")]
    start_reserved: Annotated[Int32Array, In("start", "start_num_reserved_tokens")]
    start_num_blocks: Annotated[Int32Array, In("start", "start_num_blocks")]
    start_block_ids: Annotated[Int32Array, In("start", "start_block_ids", Length.JOINED)]
    reserve_reserved: Annotated[Int32Array, In("reserve", "reserve_num_reserved_tokens", Length.LIST)]
    new_block_item_idx: Annotated[Int32Array, In("new_block", "new_block_item_idx", Length.LIST)]
    new_block_ids: Annotated[Int32Array, In("new_block", "new_block_ids")]
    update_ids: Annotated[Int64Array, In("update", "table_update_sequence_ids", Length.LIST)]
    update_table_idx: Annotated[Int32Array, In("update", "table_update_table_idx")]
    update_block_ids: Annotated[Int32Array, In("update", "table_update_block_ids")]
    copy_sources: Annotated[Int32Array, In("copy", "copy_source_block_ids", Length.LIST)]
    copy_destinations: Annotated[Int32Array, In("copy", "copy_destination_block_ids")]
    num_free: Annotated[int, "num_free_blocks"]
    num_evictable: Annotated[int, "num_evictable_blocks"]
    num_fenced: Annotated[int, "num_fenced_blocks"]
    pressure: Annotated[PressureLevel, "pressure"]
    revision: Annotated[int, "revision"]
    num_reclaim_hint: Annotated[int, "num_reclaim_hint_blocks"] = 0
    start_has_logits: Annotated[Int32Array, In("start", "start_has_logits", Length.OPTIONAL)] = NO_INT32  # empty: no start has
    swap_out_results: Annotated[Int32Array, In("swap_out", "swap_out_results", Length.LIST)] = NO_INT32
    swap_in_results: Annotated[Int32Array, In("swap_in", "swap_in_results", Length.LIST)] = NO_INT32
    transfer_ids: Annotated[Int64Array, In("transfer", "transfer_ids", Length.LIST)] = NO_INT64
    transfer_kinds: Annotated[Int32Array, In("transfer", "transfer_kinds")] = NO_INT32
    transfer_sources: Annotated[Int32Array, In("transfer", "transfer_source_block_ids")] = NO_INT32
    transfer_destinations: Annotated[Int32Array, In("transfer", "transfer_destination_block_ids")] = NO_INT32
    ready_ids: Annotated[Int64Array, In("ready", "ready_sequence_ids", Length.LIST)] = NO_INT64
    ready_hits: Annotated[Int32Array, In("ready", "ready_num_hit_tokens")] = NO_INT32
    ready_reserved: Annotated[Int32Array, In("ready", "ready_num_reserved_tokens")] = NO_INT32
    ready_num_blocks: Annotated[Int32Array, In("ready", "ready_num_blocks")] = NO_INT32
    ready_block_ids: Annotated[Int32Array, In("ready", "ready_block_ids", Length.JOINED)] = NO_INT32
    # Groups of layers; empty: all are of the first.
    new_block_groups: Annotated[Int32Array, In("new_block", "new_block_group_idx", Length.OPTIONAL)] = NO_INT32
    update_groups: Annotated[Int32Array, In("update", "table_update_group_idx", Length.OPTIONAL)] = NO_INT32
    # Where a group of layers has states, committed lengths after forks and truncates; else empty: those that were asked for.
    fork_committed: Annotated[Int32Array, In("fork", "fork_num_committed_tokens", Length.OPTIONAL)] = NO_INT32
    truncate_committed: Annotated[Int32Array, In("truncate", "truncate_num_committed_tokens", Length.LIST)] = NO_INT32


def _list_marks(values: type) -> list[tuple[str, Any, Any]]:
    """(name, type, mark) of each annotated field, in the order of the fields."""
    hints = get_type_hints(values, include_extras=True)
    return [(name, *get_args(hint)) for name, hint in hints.items() if get_origin(hint) is Annotated]


def _make_columns(values: type) -> tuple[Column, ...]:
    dtypes = ((Int64Array, np.dtype("<i8")), (Int32Array, np.dtype("<i4")))
    return tuple(
        Column(name, next(dtype for array, dtype in dtypes if array == hint), *mark)
        for name, hint, mark in _list_marks(values)
        if isinstance(mark, In)
    )


def by_list(columns: tuple[Column, ...]) -> dict[str, tuple[Column, ...]]:
    """Columns of each list; the first one says how many items the list has."""
    lists: dict[str, list[Column]] = {}
    for column in columns:
        lists.setdefault(column.list, []).append(column)
    return {name: tuple(members) for name, members in lists.items()}


# Lists whose items are looked at one by one, and how many items of them a step has at most, all together: as many as take some
# tens of milliseconds, for which all other sessions wait. Commits and reservations are array work.
WALKED_LISTS = frozenset({"fork", "truncate", "release", "start", "swap_out", "swap_in"})
MAX_STEP_ITEMS = 256

BATCH_COLUMNS = _make_columns(StepBatch)
REPLY_COLUMNS = _make_columns(StepReply)
REPLY_NUMBERS = {
    name: mark for name, _, mark in _list_marks(StepReply) if isinstance(mark, str)
}  # field of StepResponse by name
