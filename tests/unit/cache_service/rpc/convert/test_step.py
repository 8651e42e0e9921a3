"""The columns of a step on the wire: each in its field, to the byte, and refused where its length is wrong."""

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache_service.core.values.errors import InvalidField
from kvkeeper.cache_service.core.values.step_columns import BATCH_COLUMNS, REPLY_COLUMNS, Column, Length, StepReply, by_list
from kvkeeper.cache_service.core.values.types import NO_INT32, Executor, PressureLevel
from kvkeeper.cache_service.rpc.convert.step import step_batch, step_response

NUMBERS = {
    "num_free": 5,
    "num_evictable": 6,
    "num_fenced": 7,
    "pressure": PressureLevel.HIGH,
    "revision": 8,
    "num_reclaim_hint": 9,
}
OF_ITEMS = [column for column in BATCH_COLUMNS if column.length in (Length.ITEM, Length.OPTIONAL)]


def column_of(column: Column, place: int) -> np.ndarray:
    """Two items that no other column has."""
    return np.array([2 * place + 1, 2 * place + 2], column.dtype)


def whole_request() -> pb.StepRequest:
    fields = {column.field: column_of(column, place).tobytes() for place, column in enumerate(BATCH_COLUMNS)}
    return pb.StepRequest(step_id=7, completed_step_id=6, **fields)


def test_each_column_of_a_request_arrives() -> None:
    batch = step_batch(whole_request())
    assert (batch.step_id, batch.completed_step_id) == (7, 6)
    for place, column in enumerate(BATCH_COLUMNS):
        arrived = getattr(batch, column.name)
        assert arrived.dtype == column.dtype
        assert arrived.tolist() == column_of(column, place).tolist(), column.name


def test_columns_that_a_request_leaves_out_are_empty() -> None:
    batch = step_batch(pb.StepRequest(step_id=1))
    assert all(len(getattr(batch, column.name)) == 0 for column in BATCH_COLUMNS)


@pytest.mark.parametrize("column", BATCH_COLUMNS, ids=lambda column: column.field)
def test_bytes_that_do_not_divide_into_items_are_refused(column: Column) -> None:
    request = whole_request()
    setattr(request, column.field, bytes(2 * column.dtype.itemsize - 1))
    with pytest.raises(InvalidField) as refused:
        step_batch(request)
    assert refused.value.metadata["field"] == column.field


@pytest.mark.parametrize("num_items", [0, 1, 3])
@pytest.mark.parametrize("column", OF_ITEMS, ids=lambda column: column.field)
def test_a_column_is_as_long_as_its_list(column: Column, num_items: int) -> None:
    request = whole_request()
    setattr(request, column.field, bytes(num_items * column.dtype.itemsize))
    if num_items == 0 and column.length is Length.OPTIONAL:
        assert len(getattr(step_batch(request), column.name)) == 0
        return
    with pytest.raises(InvalidField) as refused:
        step_batch(request)
    assert (refused.value.metadata["field"], refused.value.metadata["limit"]) == (column.field, "2")


@pytest.mark.parametrize("column", OF_ITEMS, ids=lambda column: column.field)
def test_a_column_without_its_list_is_refused(column: Column) -> None:
    with pytest.raises(InvalidField) as refused:
        step_batch(pb.StepRequest(**{column.field: bytes(column.dtype.itemsize)}))
    assert (refused.value.metadata["field"], refused.value.metadata["limit"]) == (column.field, "0")


@pytest.mark.parametrize("executor", Executor)
def test_each_column_and_number_of_a_reply_arrives(executor: Executor) -> None:
    """Only an engine gets the transfer orders: the cache service runs its own."""
    columns = {column.name: column_of(column, place) for place, column in enumerate(REPLY_COLUMNS)}
    answer = pb.StepResponse.FromString(step_response(StepReply(**columns, **NUMBERS), 3, 4, executor))
    assert (answer.step_id, answer.epoch, answer.revision, answer.num_reclaim_hint_blocks) == (3, 4, 8, 9)
    assert (answer.num_free_blocks, answer.num_evictable_blocks, answer.num_fenced_blocks) == (5, 6, 7)
    assert answer.pressure == pb.PRESSURE_LEVEL_HIGH
    for place, column in enumerate(REPLY_COLUMNS):
        is_for = column.list != "transfer" or executor is Executor.ENGINE
        assert getattr(answer, column.field) == (column_of(column, place).tobytes() if is_for else b""), column.field


@pytest.mark.parametrize("members", by_list(REPLY_COLUMNS).values(), ids=lambda members: members[0].list)
def test_a_reply_may_have_any_one_list(members: tuple[Column, ...]) -> None:
    empty = {column.name: NO_INT32.astype(column.dtype) for column in REPLY_COLUMNS}
    columns = {column.name: column_of(column, place) for place, column in enumerate(members)}
    answer = pb.StepResponse.FromString(step_response(StepReply(**{**empty, **columns}, **NUMBERS), 3, 4, Executor.ENGINE))
    filled = {field.name for field, value in answer.ListFields() if isinstance(value, bytes)}
    assert filled == {column.field for column in members}
