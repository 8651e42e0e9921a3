"""Every field of every request, below, at and beyond its range (docs/inside/reliability.md, promise 35), by the descriptors.

Each value gets a typed refusal with the documented code, or a valid answer; a refusal changes nothing; and the whole matrix
leaves next to no memory behind.
"""

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.errors import parse_error, to_error
from tests.support.worlds.cache_api import DEADLINE, SPEC, Api, ManualClock, Session, documented_codes, le32, le64, serving
from tests.support.worlds.field_bounds import BOUNDS, COMMON, Bound

SERVICE = pb.DESCRIPTOR.services_by_name["CacheService"]
MOST_GROWTH = 8 << 20
STEPPING = ("Step", "StreamSteps", "RenewSession")
# What refusals may count, and what ends a moment after the call.
COUNTED = ("num_refusals", "num_refused_starts", "num_computing_answers", "num_watches", "num_lagged_watches",
           "num_steps", "revision")  # fmt: skip

# A valid request of each method, beside its session; one value of it is then made another.
LAWFUL: dict[str, dict[str, Any]] = {
    "CheckAdmission": {"num_prompt_tokens": 4},
    "OpenSession": {"spec": SPEC},
    "CloseSession": {"drained": True},
    "CreateSequence": {"sequence_id": 9, "token_ids": [1, 2]},
    "CreateSequences": {"sequences": [{"sequence_id": 9, "token_ids": [1, 2]}]},
    "ExtendSequence": {"sequence_id": 1, "num_tokens": 8},
    "CommitSequence": {"sequence_id": 1, "num_tokens": 6, "first_token_idx": 8},
    "ForkSequence": {"parent_id": 1, "child_id": 9},
    "TruncateSequence": {"sequence_id": 1, "num_tokens": 8},
    "UpdateSequence": {"sequence_id": 1},
    "TakeSequence": {"offer": bytes(16), "sequence_id": 9},
    "MatchPrefix": {"token_ids": [1, 2]},
    "ExplainMatch": {"token_ids": [1, 2]},
    "PinPrefix": {"token_ids": [0, 1, 2, 3], "ttl_ms": 1000},
    "HintPrefix": {"hints": [{"token_ids": [0, 1, 2, 3]}]},
    "UnpinPrefix": {"pin_id": "x"},
    "StoreLogits": {"sequence_id": 1, "logits": bytes(4), "num_tokens": 4},
    "GetBlock": {"block_id": 1},
    "WriteKv": {"sequence_id": 1, "first_token_idx": 6, "key": bytes(12), "value": bytes(12)},
}
STEP_LISTS: tuple[dict[str, bytes], ...] = (
    {"completed_transfer_ids": b""},
    {"failed_transfer_ids": b""},
    {
        "commit_sequence_ids": le64(1),
        "commit_num_tokens": le32(7),
        "commit_num_new_tokens": le32(1),
        "commit_token_ids": le32(5),
    },
    {"fork_parent_ids": le64(1), "fork_child_ids": le64(9), "fork_num_tokens": le32(5)},
    {"truncate_sequence_ids": le64(1), "truncate_num_tokens": le32(7)},
    {"release_sequence_ids": le64(1)},
    {"swap_out_sequence_ids": le64(1)},
    {"swap_in_sequence_ids": le64(1)},
    {
        "start_sequence_ids": le64(2),
        "start_max_new_tokens": le32(4),
        "start_max_hit_tokens": le32(4),
        "start_may_wait": le32(0),
    },
    {"reserve_sequence_ids": le64(1), "reserve_min_tokens": le32(8), "reserve_max_tokens": le32(8)},
)


@dataclass(frozen=True)
class Case:
    method: Any
    path: tuple[Any, ...]  # descriptors down to the field
    bound: Bound
    value: Any

    def __str__(self) -> str:
        return f"{self.method.name}.{'.'.join(field.name for field in self.path)} = {self.value!r:.60}"


def fields_of(message: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for field in message.fields:
        yield (*above, field)
        if field.message_type is not None:
            yield from fields_of(field.message_type, (*above, field))


def bound_of(field: Any) -> Bound | None:
    return BOUNDS.get(name_of(field)) or COMMON.get(field.name)


def name_of(field: Any) -> str:
    return f"{field.containing_type.name}.{field.name}"


def cases() -> Iterator[Case]:
    for method in SERVICE.methods:
        for path in fields_of(method.input_type):
            bound = bound_of(path[-1])
            assert bound is not None, path[-1].full_name
            for value in bound.values(path[-1]):
                yield Case(method, path, bound, value)


def request_of(case: Case, session: Session) -> Any:
    """The valid request of the method, with the case's value in it."""
    name = case.path[0].name
    fields = dict(LAWFUL.get(case.method.name, {}))
    known = {field.name for field in case.method.input_type.fields}
    if "sequence_id" in known:
        fields.setdefault("sequence_id", 1)
    if "epoch" in known:
        fields |= session.ids
    if case.method.input_type.name == "StepRequest":
        columns = next((columns for columns in STEP_LISTS if name in columns), {})
        fields |= {"step_id": 3, "completed_step_id": 2, **columns}
    request = GetMessageClass(case.method.input_type)(**fields)
    message = request
    for field in case.path[:-1]:
        items = getattr(message, field.name)
        message = items if not field.is_repeated else items[0] if items else items.add()
    if case.path[-1].name == "packed_token_ids":
        message.ClearField("token_ids")
    _set(message, case.path[-1], case.value)
    return request


def _set(message: Any, field: Any, value: Any) -> None:
    if field.name == "num_sink_tokens":
        message.num_window_tokens = 1
    if field.message_type is not None:
        message.ClearField(field.name)
    elif field.is_repeated:
        getattr(message, field.name)[:] = value
    else:
        setattr(message, field.name, value)


async def outcome(api: Api, case: Case, raw: bytes) -> tuple[Any, str, dict[str, str]]:
    """(code, reason, metadata); code None for an answer."""
    call = api.channel.stream_stream(f"/{SERVICE.full_name}/{case.method.name}")(iter([raw]), timeout=DEADLINE)
    try:
        while (answer := await call.read()) is not grpc.aio.EOF:
            if case.method.name == "WatchEvents":
                call.cancel()
                break
            if case.method.name == "OpenSession":
                opened = Session(api, pb.OpenSessionResponse.FromString(answer))
                await opened.call("CloseSession", drained=True)
            if case.method.name == "CreateSequences":
                (result,) = pb.CreateSequencesResponse.FromString(answer).results
                if result.error:
                    told = parse_error(result.error)
                    return told.code, told.reason, told.metadata
    except grpc.aio.AioRpcError as failure:
        error = to_error(failure)
        return failure.code(), error.reason, error.metadata
    return None, "", {}


class SmallWorld:
    """A session with sequence 1, of which 6 of 8 tokens are committed, and sequence 2, which waits."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._session: Session | None = None
        self._is_stepping = False
        self._before: tuple[Any, ...] = ()

    async def session(self, *, is_stepping: bool) -> Session:
        if self._session is None or self._is_stepping != is_stepping:
            await self.renew(is_stepping=is_stepping)
        assert self._session is not None
        return self._session

    async def renew(self, *, is_stepping: bool) -> None:
        for row in (await self._api.stats()).sessions:
            if self._session is not None and row.session_id == self._session.opened.session_id:
                await self._session.call("CloseSession", drained=True)
        session = self._session = await self._api.open(engine=False)
        self._is_stepping = is_stepping
        await session.create(1, 8)
        await session.create(2, 8)
        if is_stepping:
            await self._api.raw_step(session.start_bytes(1, 1))
            columns = {"commit_sequence_ids": le64(1), "commit_num_tokens": le32(6), "commit_num_new_tokens": le32(0)}
            await session.step(2, **columns)
        else:
            await session.call("ExtendSequence", sequence_id=1, num_tokens=8)
            await session.call("CommitSequence", sequence_id=1, num_tokens=6, first_token_idx=8)
        self._before = await self.snapshot()

    async def snapshot(self) -> tuple[Any, ...]:
        stats = await self._api.stats()
        stats.ClearField("num_opened_sessions")
        for pool in stats.pools:
            for name in COUNTED:
                pool.ClearField(name)
        sequences = await self._api.stub.ListSequences(pb.ListSequencesRequest(), timeout=DEADLINE)
        return stats.SerializeToString(deterministic=True), sequences.SerializeToString(deterministic=True)

    async def has_changed(self) -> bool:
        return await self.snapshot() != self._before


def resident_bytes() -> int:
    """What the process holds, without what it has freed and the allocator keeps."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def names_field(named: str, case: Case) -> bool:
    """Whether a refusal is for the field of the case, for a message that has it, or for a column beside it."""
    own, columns = case.path[-1], (("key", "value"), *STEP_LISTS)
    fellows = next((fields for fields in columns if own.name in fields), ())
    return own.message_type is not None or named.rsplit(".", 1)[-1] in {*fellows, *(field.name for field in case.path)}


def judge(case: Case, code: Any, reason: str, metadata: dict[str, str], codes: dict[str, str]) -> str:
    """What is wrong with the outcome; empty when nothing is."""
    if code is None:
        return "" if case.bound.holds(case.value) else "was taken"
    if reason == "BROKEN_INVARIANT" or codes.get(reason) != code.name:
        return f"was refused with {code.name} {reason or 'and no reason'}"
    if reason == "NOT_IMPLEMENTED":
        return "" if "feature" in metadata else "is not implemented"
    if not case.bound.holds(case.value) and reason not in case.bound.reasons:
        return f"is beyond its range, and was refused with {reason}"
    names = {field.name for path in fields_of(case.method.input_type) for field in path}
    if reason == "INVALID_FIELD" and metadata["field"].rsplit(".", 1)[-1] not in names:
        return f"was refused for a field {metadata['field']} that there is not"
    if reason == "INVALID_FIELD" and not case.bound.holds(case.value) and not names_field(metadata["field"], case):
        return f"is beyond its range, and was refused for {metadata['field']}"
    return ""


def test_every_field_has_a_range_and_every_range_a_field() -> None:
    fields = {name_of(path[-1]): path[-1] for method in SERVICE.methods for path in fields_of(method.input_type)}
    assert [name for name, field in fields.items() if bound_of(field) is None] == []
    assert [name for name in BOUNDS if name not in fields] == []
    assert {field.name for field in fields.values()} >= COMMON.keys()
    columns = {field.name for field in pb.StepRequest.DESCRIPTOR.fields if field.type == field.TYPE_BYTES}
    assert {name for group in STEP_LISTS for name in group} == columns
    assert documented_codes().keys() == {name.removeprefix("ERROR_REASON_") for name in pb.ErrorReason.keys()[1:]}


async def test_every_field_beside_its_bounds() -> None:
    async with serving(clock=ManualClock(), logits_memory=1 << 16) as api:
        await run_matrix(api)
        await api.audit()


async def run_matrix(api: Api) -> None:
    codes, world, wrong = documented_codes(), SmallWorld(api), list[str]()
    num_taken = num_refused = 0
    all_cases = list(cases())
    before = 0
    for number, case in enumerate((*all_cases[::5], *all_cases)):
        if number == len(all_cases[::5]):  # what any use of the service takes is taken
            before = resident_bytes()
        session = await world.session(is_stepping=case.method.name in STEPPING)
        code, reason, metadata = await outcome(api, case, request_of(case, session).SerializeToString())
        if fault := judge(case, code, reason, metadata, codes):
            wrong.append(f"{case} {fault}")
        num_taken, num_refused = num_taken + (code is None), num_refused + (code is not None)
        if await world.has_changed():
            if code is not None:
                wrong.append(f"{case} was refused with {reason} and changed something")
            await world.renew(is_stepping=case.method.name in STEPPING)
    assert not wrong, "\n" + "\n".join(wrong)
    growth = resident_bytes() - before
    assert growth <= MOST_GROWTH, f"{growth:,} bytes more after {len(all_cases)} calls"
    assert num_taken > 200
    assert num_refused > 500
