"""The columns of a Step: a StepRequest to a StepBatch, and a StepReply to the bytes of a StepResponse.

Which columns there are, and which field of a message each travels in, is declared in core/values/step_columns.py alone. Columns
are not copied on the way in, and once on the way out. This is the hot path of a step.
"""

from collections.abc import Callable
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ...core.values.errors import InvalidField
from ...core.values.step_columns import (
    BATCH_COLUMNS,
    MAX_STEP_ITEMS,
    REPLY_COLUMNS,
    WALKED_LISTS,
    Column,
    Length,
    StepBatch,
    StepReply,
    by_list,
)
from ...core.values.types import NO_INT32, NO_INT64, Executor, Int32Array, Int64Array

_INT32, _INT64 = np.dtype("<i4"), np.dtype("<i8")
_EMPTY: dict[np.dtype[Any], Any] = {_INT32: NO_INT32, _INT64: NO_INT64}

# Of a request: its columns as bytes. A place is that of a column in BATCH_COLUMNS.
RawColumns = tuple[bytes, ...]
raw_columns: Callable[[pb.StepRequest], RawColumns] = attrgetter(*(column.field for column in BATCH_COLUMNS))
_PLACES = range(len(BATCH_COLUMNS))
_DTYPES = tuple(column.dtype for column in BATCH_COLUMNS)
_NO_COLUMNS = tuple(_EMPTY[dtype] for dtype in _DTYPES)
_WALKED = tuple(
    place for place, column in enumerate(BATCH_COLUMNS) if column.list in WALKED_LISTS and column.length is Length.LIST
)
_WALKED_BYTES = MAX_STEP_ITEMS * _INT64.itemsize


_FIRST_OF_LIST = {name: BATCH_COLUMNS.index(members[0]) for name, members in by_list(BATCH_COLUMNS).items()}
# (place, place of the first column of its list) of the columns that are as long as their list, the optional ones behind.
_AS_LONG = tuple(
    (place, _FIRST_OF_LIST[column.list])
    for length in (Length.ITEM, Length.OPTIONAL)
    for place, column in enumerate(BATCH_COLUMNS)
    if column.length is length
)
_lens_of_columns, _lens_of_lists = (itemgetter(*places) for places in zip(*_AS_LONG, strict=True))


def _fields_of_list(members: tuple[Column, ...]) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Place of the list's first column in StepReply; field of the message and place of each of its columns."""
    fields = tuple((column.field, StepReply._fields.index(column.name)) for column in members)
    return fields[0][1], fields


# Of a reply: its lists by executor. Transfer orders go to engines only, because the cache service runs its own.
_REPLY_LISTS = {name: _fields_of_list(members) for name, members in by_list(REPLY_COLUMNS).items()}
_LISTS_FOR = {
    Executor.ENGINE: tuple(_REPLY_LISTS.values()),
    Executor.CACHE: tuple(fields for name, fields in _REPLY_LISTS.items() if name != "transfer"),
}


def step_batch(request: pb.StepRequest) -> StepBatch:
    """The columns of a Step as arrays over the message's bytes. Raises InvalidField."""
    raws = raw_columns(request)
    if sum(len(raws[place]) for place in _WALKED) > _WALKED_BYTES:
        raise _too_many(raws)
    columns = list(_NO_COLUMNS)
    try:
        for place in compress(_PLACES, raws):
            columns[place] = np.frombuffer(raws[place], _DTYPES[place])
    except ValueError:
        column = BATCH_COLUMNS[place]
        raise _ragged(column.field, column.dtype) from None
    lens = tuple(map(len, columns))
    if _lens_of_columns(lens) != _lens_of_lists(lens):
        for place, first in _AS_LONG:
            if lens[place] != lens[first] and (raws[place] or BATCH_COLUMNS[place].length is Length.ITEM):
                raise _unequal(place, first, columns)
    return StepBatch(request.step_id, request.completed_step_id, *columns)


def step_response(reply: StepReply, step_id: int, epoch: int, executor: Executor) -> bytes:
    """The StepResponse to a Step, as the bytes that every repeat of the Step gets."""
    response = pb.StepResponse(
        step_id=step_id,
        epoch=epoch,
        revision=reply.revision,
        num_free_blocks=reply.num_free,
        num_evictable_blocks=reply.num_evictable,
        num_fenced_blocks=reply.num_fenced,
        pressure=reply.pressure,  # type: ignore[arg-type]  # the numbers are the protocol's
        num_reclaim_hint_blocks=reply.num_reclaim_hint,
    )
    columns: tuple[Any, ...] = reply
    for first, fields in _LISTS_FOR[executor]:
        if len(columns[first]):
            for field, place in fields:
                setattr(response, field, columns[place].tobytes())
    return response.SerializeToString()


def transfer_report(request: pb.RenewSessionRequest) -> tuple[Int64Array, Int64Array]:
    """Ids of transfer orders that are completed, and of those that failed. Raises InvalidField."""
    completed = _column(request.completed_transfer_ids, _INT64, "completed_transfer_ids")
    return completed, _column(request.failed_transfer_ids, _INT64, "failed_transfer_ids")


def int32_column(raw: bytes, field: str) -> Int32Array:
    """Raises InvalidField."""
    return _column(raw, _INT32, field)


def _column(raw: bytes, dtype: np.dtype[Any], field: str) -> Any:
    if len(raw) % dtype.itemsize:
        raise _ragged(field, dtype)
    return np.frombuffer(raw, dtype) if raw else _EMPTY[dtype]


def _ragged(field: str, dtype: np.dtype[Any]) -> InvalidField:
    return InvalidField(f"the column holds {dtype.itemsize} bytes an item", field=field)


def _too_many(raws: RawColumns) -> InvalidField:
    field = BATCH_COLUMNS[max(_WALKED, key=lambda place: len(raws[place]))].field  # the one that has most of them
    text = f"forks, truncates, releases, swaps and starts of a step are at most {MAX_STEP_ITEMS} together"
    return InvalidField(text, field=field, limit=MAX_STEP_ITEMS)


def _unequal(place: int, first: int, columns: list[Any]) -> InvalidField:
    field, of, count = BATCH_COLUMNS[place].field, BATCH_COLUMNS[first].field, len(columns[first])
    return InvalidField(f"{field} has {len(columns[place])} items, {of} has {count}", field=field, limit=count)
