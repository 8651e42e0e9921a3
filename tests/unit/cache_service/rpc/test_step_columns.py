"""The declared columns of a step are those of the protocol's messages, and of the Python client."""

from dataclasses import fields

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.cache.v1.cache_service_pb2_comments import COMMENTS
from kvkeeper.cache_service.core.values.step_columns import (
    BATCH_COLUMNS,
    REPLY_COLUMNS,
    REPLY_NUMBERS,
    Column,
    Length,
    StepBatch,
    StepReply,
    by_list,
)
from kvkeeper.client.steps import StepItems, StepResult, decode, encode

MESSAGES = [
    pytest.param(BATCH_COLUMNS, pb.StepRequest.DESCRIPTOR, id="batch"),
    pytest.param(REPLY_COLUMNS, pb.StepResponse.DESCRIPTOR, id="reply"),
]


@pytest.mark.parametrize(("columns", "message"), MESSAGES)
def test_each_bytes_field_of_the_message_is_one_column_of_the_documented_width(
    columns: tuple[Column, ...], message: Descriptor
) -> None:
    in_bytes = {field.name for field in message.fields if field.type == FieldDescriptor.TYPE_BYTES}
    assert sorted(column.field for column in columns) == sorted(in_bytes)
    documented = {name: COMMENTS[f"{message.name}.{name}"][:4] for name in in_bytes}
    assert {column.field: f"LE{8 * column.dtype.itemsize}" for column in columns} == documented


def test_the_numbers_of_a_reply_are_fields_of_the_response() -> None:
    in_bytes = {column.field for column in REPLY_COLUMNS}
    others = {field.name for field in pb.StepResponse.DESCRIPTOR.fields} - in_bytes
    assert others - set(REPLY_NUMBERS.values()) == {"step_id", "epoch"}  # an echo, and the session's
    assert len(set(REPLY_NUMBERS.values())) == len(REPLY_NUMBERS)


@pytest.mark.parametrize("columns", [BATCH_COLUMNS, REPLY_COLUMNS], ids=["batch", "reply"])
def test_each_list_has_one_column_that_counts_its_items_and_it_is_the_first(columns: tuple[Column, ...]) -> None:
    for members in by_list(columns).values():
        assert [column.length is Length.LIST for column in members] == [True] + [False] * (len(members) - 1)


def test_every_field_of_a_batch_and_of_a_reply_is_declared() -> None:
    assert {"step_id", "completed_step_id", "start_exact", *(column.name for column in BATCH_COLUMNS)} == set(StepBatch._fields)
    assert {*REPLY_NUMBERS, *(column.name for column in REPLY_COLUMNS)} == set(StepReply._fields)


def test_columns_that_are_left_out_are_empty_and_of_their_width() -> None:
    batch = StepBatch(1, 0)
    for column in BATCH_COLUMNS:
        value = getattr(batch, column.name)
        assert len(value) == 0 and value.dtype == column.dtype


@pytest.mark.parametrize("column", BATCH_COLUMNS, ids=lambda column: column.name)
def test_the_client_sends_a_column_by_its_name_in_its_field(column: Column) -> None:
    assert column.name in {field.name for field in fields(StepItems)}
    value = np.array([3, 1, 2], column.dtype)
    request = pb.StepRequest.FromString(encode(StepItems(**{column.name: value}), "a", 1, 1, 0))
    filled = [field.name for field, _ in request.ListFields() if field.type == FieldDescriptor.TYPE_BYTES]
    assert filled == [column.field]
    assert getattr(request, column.field) == value.tobytes()


def test_the_client_reads_every_column_and_number_of_a_reply_from_its_field() -> None:
    expected = {column.name: np.array([at, at + 1], column.dtype) for at, column in enumerate(REPLY_COLUMNS)}
    numbers = {name: at % 4 + 1 for at, name in enumerate(REPLY_NUMBERS)}
    response = pb.StepResponse(**{column.field: expected[column.name].tobytes() for column in REPLY_COLUMNS})
    for name, field in REPLY_NUMBERS.items():
        setattr(response, field, numbers[name])
    result = decode(response.SerializeToString())
    assert set(StepResult._fields) == {"step_id", *expected, *numbers}
    for name, value in expected.items():
        np.testing.assert_array_equal(getattr(result, name), value)
    assert {name: getattr(result, name) for name in numbers} == numbers
