"""Hostile values: the answer to each is a typed refusal or a valid success, and the state is sound."""

import random
from typing import Any

import grpc
import grpc.aio
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.errors import error_of
from tests.support.worlds.cache_api import DEADLINE, Api, Session, le32, le64

METHODS = [
    method
    for method in pb.DESCRIPTOR.services_by_name["CacheService"].methods
    if method.name not in ("CloseSession", "WatchEvents", "StreamSteps")  # these end or occupy what the next call needs
]
INT32 = [0, 1, -1, 2**31 - 1, -(2**31)]
INT64 = [*INT32, 2**53 - 1, 2**53, 2**63 - 1, -(2**63)]
VALUES: dict[int, list[Any]] = {
    1: [0.0],  # double
    3: INT64,
    5: INT32,
    8: [True],
    9: ["", "x" * 5000, "\0"],
    12: [b"", b"\xff" * 7, le32(-1), le64(-1), le64(2**63 - 1), bytes(64)],
    13: [0, 2**31 - 1, 2**32 - 1],
    14: [0, 1, 77],
}


async def session_with_sequence(api: Api) -> Session:
    """Sequence 1 runs with 6 of 8 tokens committed."""
    session = await api.open(engine=False)
    await session.create(1, 8)
    await session.call("ExtendSequence", sequence_id=1, num_tokens=8)
    await session.call("CommitSequence", sequence_id=1, num_tokens=6, first_token_idx=8)
    return session


async def outcome(api: Api, method: Any, raw: bytes) -> str:
    """The reason of a refusal, or OK. Anything that is neither fails the test."""
    call = api.channel.stream_stream(f"/kvkeeper.cache.v1.CacheService/{method.name}")(iter([raw]), timeout=DEADLINE)
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as failure:
        error = error_of(failure)
        assert error.reason not in ("", "BROKEN_INVARIANT"), (method.name, raw, error)
        return error.reason
    return "OK"


def bounded_fields(method: Any) -> list[Any]:
    """Fields of a request with values to be tried; a wrong session or epoch says nothing about the rest."""
    fields = method.input_type.fields
    return [field for field in fields if field.type in VALUES and field.name not in ("session_id", "epoch")]


@pytest.mark.parametrize("method", [*filter(bounded_fields, METHODS)], ids=lambda method: method.name)
async def test_every_field_at_its_bounds(api: Api, method: Any) -> None:
    names = {field.name for field in method.input_type.fields}
    for field in bounded_fields(method):
        for value in VALUES[field.type]:
            session = await session_with_sequence(api)
            valid = session.ids | {"sequence_id": 1, "num_tokens": 7, "token_ids": [1]}
            request = getattr(pb, method.input_type.name)(**{name: valid[name] for name in names & valid.keys()})
            if field.is_repeated:
                getattr(request, field.name)[:] = [value]
            else:
                setattr(request, field.name, value)
            await outcome(api, method, request.SerializeToString())
            await session.call("CloseSession", drained=True)
            await api.audit()


async def test_steps_of_hostile_columns(api: Api) -> None:
    """Columns of valid shape with values from everywhere, seeded."""
    rng = random.Random(2)
    lists = (
        ("commit_sequence_ids", "commit_num_tokens", "commit_num_new_tokens"),
        ("fork_parent_ids", "fork_child_ids", "fork_num_tokens"),
        ("truncate_sequence_ids", "truncate_num_tokens"),
        ("release_sequence_ids",),
        ("start_sequence_ids", "start_max_new_tokens", "start_max_hit_tokens"),
        ("reserve_sequence_ids", "reserve_min_tokens", "reserve_max_tokens"),
    )
    session = await api.open()
    step_id, outcomes = 1, set()
    (method,) = [method for method in METHODS if method.name == "Step"]
    for round_idx in range(400):
        if round_idx % 40 == 0:
            await session.create(1 + round_idx, 8)
        columns: dict[str, bytes] = {}
        for names in rng.sample(lists, rng.randint(1, 2)):
            count = rng.randint(1, 3)
            for name in names:
                is_id = name.endswith("_ids")
                values = [rng.choice([1, 2, 3, 41, 5, 6, *(INT64 if is_id else INT32)]) for _ in range(count)]
                columns[name] = le64(*values) if is_id else le32(*values)
        if rng.random() < 0.3:
            columns["commit_token_ids"] = le32(*(rng.choice([1, 2, *INT32]) for _ in range(rng.randint(0, 4))))
        result = await outcome(api, method, session.step_bytes(step_id, **columns))
        outcomes.add(result)
        step_id += result == "OK"
        await api.audit()
    assert {"OK", "INVALID_FIELD", "UNKNOWN_SEQUENCE", "WRONG_STATE"} <= outcomes


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_random_bytes(api: Api, method: Any) -> None:
    rng = random.Random(method.name)
    session = await session_with_sequence(api)
    prefix = pb.RenewSessionRequest(**session.ids).SerializeToString()  # every session's call begins like this
    for _ in range(30):
        raw = rng.randbytes(rng.randint(0, 40))
        await outcome(api, method, raw)
        await outcome(api, method, prefix + raw)
