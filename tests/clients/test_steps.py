"""The hot columns: what is encoded reads back, and what would be read as other numbers is refused."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import StepItems, StepResult, decode, encode
from kvkeeper.client.steps import _REQUEST_COLUMNS

MAX_ID = 2**53 - 1
# (field of StepResult, field of StepResponse, dtype)
ANSWER_COLUMNS = (
    ("fork_results", "fork_results", "<i4"),
    ("start_results", "start_results", "<i4"),
    ("start_hits", "start_num_hit_tokens", "<i4"),
    ("start_reserved", "start_num_reserved_tokens", "<i4"),
    ("start_num_blocks", "start_num_blocks", "<i4"),
    ("start_block_ids", "start_block_ids", "<i4"),
    ("start_has_logits", "start_has_logits", "<i4"),
    ("reserve_reserved", "reserve_num_reserved_tokens", "<i4"),
    ("new_block_item_idx", "new_block_item_idx", "<i4"),
    ("new_block_ids", "new_block_ids", "<i4"),
    ("update_ids", "table_update_sequence_ids", "<i8"),
    ("update_table_idx", "table_update_table_idx", "<i4"),
    ("update_block_ids", "table_update_block_ids", "<i4"),
    ("copy_sources", "copy_source_block_ids", "<i4"),
    ("copy_destinations", "copy_destination_block_ids", "<i4"),
)
MOVE_COLUMNS = (
    ("swap_out_results", "swap_out_results", "<i4"),
    ("swap_in_results", "swap_in_results", "<i4"),
    ("transfer_ids", "transfer_ids", "<i8"),
    ("transfer_kinds", "transfer_kinds", "<i4"),
    ("transfer_sources", "transfer_source_block_ids", "<i4"),
    ("transfer_destinations", "transfer_destination_block_ids", "<i4"),
    ("ready_ids", "ready_sequence_ids", "<i8"),
    ("ready_hits", "ready_num_hit_tokens", "<i4"),
    ("ready_reserved", "ready_num_reserved_tokens", "<i4"),
    ("ready_num_blocks", "ready_num_blocks", "<i4"),
    ("ready_block_ids", "ready_block_ids", "<i4"),
    ("new_block_groups", "new_block_group_idx", "<i4"),
    ("update_groups", "table_update_group_idx", "<i4"),
    ("fork_committed", "fork_num_committed_tokens", "<i4"),
    ("truncate_committed", "truncate_num_committed_tokens", "<i4"),
)
ANSWER_COUNTS = (
    ("num_free", "num_free_blocks"),
    ("num_evictable", "num_evictable_blocks"),
    ("num_fenced", "num_fenced_blocks"),
    ("num_reclaim_hint", "num_reclaim_hint_blocks"),
    ("revision", "revision"),
)


def column(dtype: Any) -> st.SearchStrategy[Any]:
    most = MAX_ID if np.dtype(dtype).itemsize == 8 else 2**31 - 1
    return st.lists(st.integers(0, most), max_size=5).map(lambda values: np.array(values, dtype))


@settings(deadline=None)
@given(
    st.fixed_dictionaries({name: column(dtype) for name, _, dtype in _REQUEST_COLUMNS}),
    st.integers(1, MAX_ID),
    st.integers(1, MAX_ID),
)
def test_a_step_reads_back_as_it_was_written(columns: dict[str, Any], epoch: int, step_id: int) -> None:
    raw = encode(StepItems(**columns), "s1", epoch, step_id, step_id - 1)
    request = pb.StepRequest.FromString(raw)
    assert (request.session_id, request.epoch, request.step_id) == ("s1", epoch, step_id)
    assert request.completed_step_id == step_id - 1
    for name, wire_name, dtype in _REQUEST_COLUMNS:
        assert np.frombuffer(getattr(request, wire_name), dtype).tolist() == columns[name].tolist()


@settings(deadline=None)
@given(
    st.fixed_dictionaries({name: column(dtype) for name, _, dtype in ANSWER_COLUMNS}),
    st.fixed_dictionaries({name: st.integers(0, 2**31 - 1) for name, _ in ANSWER_COUNTS}),
)
def test_an_answer_reads_back_as_it_was_written(columns: dict[str, Any], counts: dict[str, int]) -> None:
    message = pb.StepResponse(step_id=7, pressure=pb.PRESSURE_LEVEL_HIGH)
    for name, wire_name, _ in ANSWER_COLUMNS:
        setattr(message, wire_name, columns[name].tobytes())
    for name, wire_name in ANSWER_COUNTS:
        setattr(message, wire_name, counts[name])
    result = decode(message.SerializeToString())
    assert (result.step_id, result.pressure) == (7, pb.PRESSURE_LEVEL_HIGH)
    for name, _, dtype in ANSWER_COLUMNS:
        assert getattr(result, name).tolist() == columns[name].tolist()
        assert getattr(result, name).dtype == dtype
    for name, _ in ANSWER_COUNTS:
        assert getattr(result, name) == counts[name]


def test_a_request_has_the_bytes_that_protobuf_writes() -> None:
    """Over all columns, as a repeat is recognised by its bytes, and other clients write theirs with protobuf."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        lens = np.where(rng.random(len(_REQUEST_COLUMNS)) < 0.4, rng.integers(0, 300, len(_REQUEST_COLUMNS)), 0).tolist()
        most = [MAX_ID if dtype.itemsize == 8 else 2**31 - 1 for _, _, dtype in _REQUEST_COLUMNS]
        columns = {
            name: rng.integers(0, high, length, dtype=dtype)
            for (name, _, dtype), high, length in zip(_REQUEST_COLUMNS, most, lens, strict=True)
        }
        epoch, step_id, completed = (int(2.0 ** rng.uniform(0, 62)) - 1 for _ in range(3))
        traceparent = "00-trace" * int(rng.integers(0, 3))
        message = pb.StepRequest(
            session_id="s" * int(rng.integers(0, 40)), epoch=epoch, step_id=step_id, completed_step_id=completed
        )
        for name, field, _ in _REQUEST_COLUMNS:
            if len(columns[name]):
                setattr(message, field, columns[name].tobytes())
        if traceparent:
            message.traceparent = traceparent
        raw = encode(StepItems(**columns), message.session_id, epoch, step_id, completed, traceparent)
        assert raw == message.SerializeToString()


@pytest.mark.parametrize("alone", ["swap_out_results", "swap_in_results", "transfer_ids", "ready_ids"])
def test_swaps_and_orders_are_read_wherever_one_is_there(alone: str) -> None:
    groups = {"transfer_ids": "transfer", "ready_ids": "ready"}
    message = pb.StepResponse()
    told = [column for column in MOVE_COLUMNS if column[0].startswith(groups.get(alone, alone))]
    for name, wire_name, dtype in told:
        setattr(message, wire_name, np.array([len(name), 2**31 - 1], dtype).tobytes())
    result = decode(message.SerializeToString())
    for name, _, dtype in MOVE_COLUMNS:
        wanted = [len(name), 2**31 - 1] if any(name == other for other, *_ in told) else []
        assert getattr(result, name).tolist() == wanted
        assert getattr(result, name).dtype == dtype


def test_every_column_of_the_client_is_in_the_message() -> None:
    assert {name for name, _, _ in _REQUEST_COLUMNS} == {entry.name for entry in fields(StepItems)}
    answers = {name for name, *_ in (*ANSWER_COLUMNS, *MOVE_COLUMNS, *ANSWER_COUNTS)} | {"step_id", "pressure"}
    assert answers == set(StepResult._fields)
    known = set(pb.StepRequest.DESCRIPTOR.fields_by_name)
    assert {wire_name for _, wire_name, _ in _REQUEST_COLUMNS} <= known


@pytest.mark.parametrize(
    "wrong",
    [np.array([1, 2], np.int32), np.array([1.0]), np.array([[1]], np.int64), np.array([1], ">i8"), np.array(1)],
    ids=["narrow", "float", "two-dimensional", "big-endian", "scalar"],
)
def test_a_column_of_another_kind_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="release_ids"):
        encode(StepItems(release_ids=wrong), "s1", 1, 1, 0)


def test_a_column_that_is_no_whole_number_of_items_is_refused() -> None:
    with pytest.raises(ValueError):
        decode(pb.StepResponse(new_block_ids=b"\1\0\0").SerializeToString())


def test_views_of_strided_arrays_are_written_in_order() -> None:
    raw = encode(StepItems(release_ids=np.arange(1, 9, dtype=np.int64)[::2]), "s1", 1, 1, 0)
    assert np.frombuffer(pb.StepRequest.FromString(raw).release_sequence_ids, "<i8").tolist() == [1, 3, 5, 7]
