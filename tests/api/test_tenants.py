"""Tenants are isolated in data: what is another tenant's answers as if it did not exist, beside a control that finds it.

Every probe is made three times: of another tenant's, of something that does not exist, whose answer has to be the same, and by
the tenant itself, which has to succeed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.attaching import attaching
from kvkeeper.client.engine.many import _REFUSED_AT_WRITE
from kvkeeper.client.errors import KvkeeperError, parse_error, to_error
from kvkeeper.common.trust.caller import Caller, Role
from tests.support.trust.guarded_server import TokenFile, bearer
from tests.support.worlds.cache_api import BLOCK_SIZE, DEADLINE, SPEC, Api, Session, le64, serving, spec_of
from tests.support.worlds.step_carriers import LaneStream, attach_lane, call_frame

PROMPT = list(range(1, 2 * BLOCK_SIZE + 2))
TENANTS = ("a", "b")
NO_SESSION = "0" * 32


@dataclass
class Prober:
    """Calls with one credential."""

    api: Api
    token: str

    async def ask(self, method: str, request: Any) -> Any:
        """The answer, or the code, reason and text of its refusal. A stream's first message stands for all."""
        call = getattr(self.api.stub, method)
        requests = iter([request]) if method in ("WriteKv", "StreamSteps") else request
        made = call(requests, timeout=DEADLINE, metadata=bearer(self.token))
        try:
            if hasattr(made, "read"):
                return await made.read()
            return await made
        except grpc.RpcError as error:
            refused = to_error(error)
            if refused.message == _REFUSED_AT_WRITE:
                return await self.ask(method, request)
            return refused.code.name, refused.reason, refused.message, tuple(sorted(refused.metadata.items()))
        finally:
            made.cancel()


@dataclass
class Owned:
    """A session with a sequence that has two cached blocks. ids: fields of every call on it."""

    ids: dict[str, Any]
    sequence_id: int


@dataclass
class World:
    """Callers by role and tenant, and what each of them has."""

    api: Api
    tokens: dict[tuple[Role, str], str]
    owned: dict[str, Owned]  # by tenant; "*": of an engine of all tenants, a sequence for each tenant

    def prober(self, role: Role, tenant: str) -> Prober:
        return Prober(self.api, self.tokens[role, tenant])


@asynccontextmanager
async def worlds(folder: Path) -> AsyncIterator[World]:
    tokens = TokenFile(folder / "tokens")
    by_caller = {
        (role, tenant): tokens.add(Caller(f"{role}{place}", tenant, role))
        for role in Role
        for place, tenant in enumerate((*TENANTS, "*"))
    }
    async with serving(auth_tokens=tokens.path, logits_memory=1 << 12) as api:
        world = World(api, by_caller, {})
        for tenant in (*TENANTS, "*"):
            engine = world.prober(Role.ENGINE, tenant)
            opened = await engine.ask("OpenSession", pb.OpenSessionRequest(spec=SPEC, executor=pb.EXECUTOR_CACHE))
            ids = {"session_id": opened.session_id, "epoch": opened.epoch}
            for number, owner in enumerate(TENANTS if tenant == "*" else (tenant,), 1):
                sequence_id = 100 * number if tenant == "*" else 7
                named = {"tenant": owner} if tenant == "*" else {}
                created = await engine.ask(
                    "CreateSequence",
                    pb.CreateSequenceRequest(**ids, sequence_id=sequence_id, token_ids=PROMPT, **named),
                )
                assert isinstance(created, pb.CreateSequenceResponse), created
                grown = await engine.ask(
                    "ExtendSequence", pb.ExtendSequenceRequest(**ids, sequence_id=sequence_id, num_tokens=len(PROMPT) + 4)
                )
                assert isinstance(grown, pb.ExtendSequenceResponse), grown
                committed = await engine.ask(
                    "CommitSequence", pb.CommitSequenceRequest(**ids, sequence_id=sequence_id, num_tokens=len(PROMPT))
                )
                assert isinstance(committed, pb.CommitSequenceResponse), committed
            world.owned[tenant] = Owned(ids, 100 if tenant == "*" else 7)
        yield world
        await api.audit()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with worlds(tmp_path) as made:
        yield made


def request_of(method: str, owned: Owned) -> Any:
    """A valid request of what is owned."""
    ids, one = owned.ids, {"sequence_id": owned.sequence_id}
    fields: dict[str, dict[str, Any]] = {
        "GetSequence": one,
        "ReadKv": one,
        "ReadLogits": one,
        "ExtendSequence": {**one, "num_tokens": len(PROMPT) + 5},
        "CommitSequence": {**one, "num_tokens": len(PROMPT)},
        "TruncateSequence": {**one, "num_tokens": len(PROMPT)},
        "UpdateSequence": {**one, "priority": 3},
        "ForkSequence": {"parent_id": owned.sequence_id, "child_id": 9, "num_tokens": len(PROMPT)},
        "ReleaseSequence": one,
        "HandOffSequence": one,
        "WithdrawHandOff": one,
        "SwapOutSequence": one,
        "CreateSequence": {"sequence_id": 8, "token_ids": PROMPT},
        "CreateSequences": {"sequences": [{"sequence_id": 8, "token_ids": PROMPT}]},
        "MatchPrefix": {"token_ids": PROMPT},
        "ExplainMatch": {"token_ids": PROMPT},
        "PinPrefix": {"token_ids": PROMPT, "ttl_ms": 1000},
        "HintPrefix": {"hints": [{"token_ids": PROMPT}]},
        "CheckAdmission": {"token_ids": PROMPT},
        "SelectVictims": {"num_blocks": 1},
        "RenewSession": {},
        "CloseSession": {"drained": True},
        "WatchEvents": {},
        "WriteKv": {**one, "layer_idx": 0, "first_token_idx": len(PROMPT), "key": bytes(12), "value": bytes(12)},
        "Step": {"step_id": 1, "release_sequence_ids": le64(owned.sequence_id)},
        "StreamSteps": {"step_id": 1, "release_sequence_ids": le64(owned.sequence_id)},
    }
    name = "Step" if method == "StreamSteps" else method
    return getattr(pb, f"{name}Request")(**ids, **fields[method])


READING = ("GetSequence", "ReadKv", "MatchPrefix", "ExplainMatch", "CheckAdmission", "WatchEvents")
CHANGING = (
    "RenewSession", "CreateSequence", "CreateSequences", "ExtendSequence", "CommitSequence", "UpdateSequence", "ForkSequence",
    "PinPrefix", "HintPrefix", "SelectVictims", "HandOffSequence", "WithdrawHandOff", "WriteKv", "TruncateSequence",
    "ReleaseSequence", "CloseSession",
)  # fmt: skip


@pytest.mark.parametrize("method", READING + CHANGING)
async def test_another_tenants_session_answers_as_one_that_does_not_exist(world: World, method: str) -> None:
    victim = world.owned["a"]
    nothing = Owned({**victim.ids, "session_id": NO_SESSION}, victim.sequence_id)
    for role in (Role.ENGINE, Role.READER, Role.OPERATOR):
        if role is Role.READER and method not in READING:
            continue
        foreign, own = world.prober(role, "b"), world.prober(Role.ENGINE if method in CHANGING else role, "a")
        answer = await foreign.ask(method, request_of(method, victim))
        assert answer == await foreign.ask(method, request_of(method, nothing))
        assert answer[1] == "UNKNOWN_SESSION"
    control = await own.ask(method, request_of(method, victim))
    assert not isinstance(control, tuple), control


@pytest.mark.parametrize("method", CHANGING)
async def test_a_caller_of_one_tenant_changes_nothing_in_a_session_of_all(world: World, method: str) -> None:
    shared = world.owned["*"]
    answer = await world.prober(Role.ENGINE, "a").ask(method, request_of(method, shared))
    assert isinstance(answer, tuple) and answer[1] == "UNKNOWN_SESSION"
    control = await world.prober(Role.ENGINE, "*").ask(method, request_of(method, shared))
    assert not isinstance(control, tuple), control


@pytest.mark.parametrize("method", ["Step", "StreamSteps"])
@pytest.mark.parametrize("owner", ["a", "*"])
async def test_no_step_in_anothers_session(tmp_path: Path, method: str, owner: str) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    shown = {tenant: tokens.add(Caller(f"e{tenant}", tenant, Role.ENGINE)) for tenant in ("a", "b", "*")}
    async with serving(auth_tokens=tokens.path) as api:
        probers = {tenant: Prober(api, token) for tenant, token in shown.items()}
        executor = pb.EXECUTOR_ENGINE if owner == "*" else pb.EXECUTOR_CACHE
        opened = await probers[owner].ask("OpenSession", pb.OpenSessionRequest(spec=SPEC, executor=executor))
        step = pb.StepRequest(session_id=opened.session_id, epoch=opened.epoch, step_id=1, completed_step_id=0)
        raw = step.SerializeToString()
        metadata = bearer(shown["b"])
        if method == "Step":
            foreign: Any = api.raw_step(raw, timeout=DEADLINE, metadata=metadata)
        else:
            foreign = api.raw_stream(iter([raw]), timeout=DEADLINE, metadata=metadata).read()
        with pytest.raises(grpc.RpcError) as refused:
            await foreign
        assert to_error(refused.value).reason == "UNKNOWN_SESSION"
        answer = await api.raw_step(raw, timeout=DEADLINE, metadata=bearer(shown[owner]))
        assert pb.StepResponse.FromString(answer).step_id == 1


@pytest.mark.parametrize("method", ["GetSequence", "ReadKv"])
async def test_a_reader_finds_its_tenants_sequences_in_a_session_of_all(world: World, method: str) -> None:
    reader, shared = world.prober(Role.READER, "a"), world.owned["*"]
    own, foreign, nothing = (Owned(shared.ids, sequence_id) for sequence_id in (100, 200, 300))
    assert not isinstance(await reader.ask(method, request_of(method, own)), tuple)
    answers = [await reader.ask(method, request_of(method, each)) for each in (foreign, nothing)]
    assert [answer[1] for answer in answers] == ["UNKNOWN_SEQUENCE"] * 2
    assert answers[0][2].replace("200", "300") == answers[1][2]
    of_all = world.prober(Role.READER, "*")
    assert not isinstance(await of_all.ask(method, request_of(method, foreign)), tuple)


async def test_lists_and_statistics_show_what_is_ones_own(world: World) -> None:
    listed = {}
    for tenant in (*TENANTS, "*"):
        rows = (await world.prober(Role.READER, tenant).ask("ListSequences", pb.ListSequencesRequest())).sequences
        stats = await world.prober(Role.READER, tenant).ask("GetStats", pb.GetStatsRequest())
        listed[tenant] = sorted(row.sequence_id for row in rows)
        ids = {session.session_id for session in stats.sessions}
        expected = set(TENANTS) | {"*"} if tenant == "*" else {tenant}
        assert ids == {world.owned[name].ids["session_id"] for name in expected}
    assert listed == {"a": [7, 100], "b": [7, 200], "*": [7, 7, 100, 200]}
    of_other = pb.ListSequencesRequest(session_id=world.owned["a"].ids["session_id"])
    of_none = pb.ListSequencesRequest(session_id=NO_SESSION)
    prober = world.prober(Role.READER, "b")
    assert await prober.ask("ListSequences", of_other) == await prober.ask("ListSequences", of_none)


async def test_who_missed_what_is_named_to_callers_of_all_tenants_alone(world: World) -> None:
    shown = {}
    for tenant in ("a", "*"):
        (pool,) = (await world.prober(Role.READER, tenant).ask("GetStats", pb.GetStatsRequest())).pools
        shown[tenant] = {miss.tenant for miss in pool.misses} | {miss.evicted_for for miss in pool.misses}
        assert sum(miss.num_tokens for miss in pool.misses) == pool.num_look_up_tokens - pool.num_hit_tokens > 0
        assert len({(miss.tenant, miss.cause, miss.need, miss.within_turnovers) for miss in pool.misses}) == len(pool.misses)
    assert shown == {"a": {""}, "*": {"", *TENANTS}}


@pytest.mark.parametrize(
    "method", ["MatchPrefix", "ExplainMatch", "PinPrefix", "CheckAdmission", "CreateSequence", "WatchEvents"]
)
@pytest.mark.parametrize("named", ["b", "*", "A", ""])
async def test_a_tenant_is_the_credentials_or_is_refused(world: World, method: str, named: str) -> None:
    engine, owned = world.prober(Role.ENGINE, "a"), world.owned["a"]
    request = request_of(method, owned)
    request.tenant = named
    answer = await engine.ask(method, request)
    if named:
        assert answer[:2] == ("PERMISSION_DENIED", "TENANT_NOT_ALLOWED")
        assert answer[3] == (("field", "tenant"),)
    else:
        assert not isinstance(answer, tuple)
        num_cached = {"MatchPrefix": "num_matched_tokens", "CreateSequence": "num_matched_tokens"}.get(method)
        assert num_cached is None or getattr(answer, num_cached) == 2 * BLOCK_SIZE  # its own cache, though no tenant was named


@pytest.mark.parametrize("named", ["b", "*", "A", ""])
async def test_each_of_many_hints_is_of_the_credentials_tenant_or_is_refused(world: World, named: str) -> None:
    hints = [{"token_ids": PROMPT, "tenant": tenant} for tenant in ("a", named)]
    request = pb.HintPrefixRequest(**world.owned["a"].ids, hints=hints)
    answer = await world.prober(Role.ENGINE, "a").ask("HintPrefix", request)
    if named:
        assert (answer[:2], answer[3]) == (("PERMISSION_DENIED", "TENANT_NOT_ALLOWED"), (("field", "tenant"),))
    else:
        assert list(answer.num_hinted_tokens) == [2 * BLOCK_SIZE] * 2


@pytest.mark.parametrize("named", ["b", "*", "A", ""])
async def test_each_of_many_sequences_is_of_the_credentials_tenant_or_is_refused(world: World, named: str) -> None:
    new = [{"sequence_id": place, "token_ids": PROMPT, "tenant": tenant} for place, tenant in ((8, named), (9, "a"))]
    answer = await world.prober(Role.ENGINE, "a").ask(
        "CreateSequences", pb.CreateSequencesRequest(**world.owned["a"].ids, sequences=new)
    )
    first, last = answer.results
    assert last.response.num_matched_tokens == 2 * BLOCK_SIZE
    if named:
        told = parse_error(first.error)
        assert (told.code.name, told.reason, told.metadata) == ("PERMISSION_DENIED", "TENANT_NOT_ALLOWED", {"field": "tenant"})
    else:
        assert first.response.num_matched_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("ClearPrefixCache", {}),
        ("EvictBlocks", {"num_blocks": 1}),
        ("CollectGarbage", {}),
        ("GetBlock", {"block_id": 1}),
        ("TakeSequence", {"sequence_id": 3, "offer": bytes(16)}),
    ],
)
async def test_what_is_about_all_tenants_needs_a_credential_for_all(world: World, method: str, fields: Any) -> None:
    make = getattr(pb, f"{method}Request")
    answer = await world.prober(Role.OPERATOR, "a").ask(method, make(**world.owned["a"].ids, **fields))
    assert answer[:2] == ("PERMISSION_DENIED", "TENANT_NOT_ALLOWED")
    control = await world.prober(Role.OPERATOR, "*").ask(method, make(**world.owned["a"].ids, **fields))
    assert not isinstance(control, tuple) or control[1] == "UNKNOWN_OFFER"


async def test_the_audit_needs_a_credential_for_all(world: World) -> None:
    answer = await world.prober(Role.OPERATOR, "a").ask("CheckInvariants", pb.CheckInvariantsRequest())
    assert answer[1] == "TENANT_NOT_ALLOWED"
    control = await world.prober(Role.OPERATOR, "*").ask("CheckInvariants", pb.CheckInvariantsRequest())
    assert not control.violations


@pytest.mark.parametrize("role", [Role.ENGINE, Role.OPERATOR])
async def test_memory_is_handed_to_callers_for_all_tenants_alone(world: World, role: Role) -> None:
    one, of_all = world.prober(role, "a"), world.prober(role, "*")
    by_engine = pb.OpenSessionRequest(spec=SPEC, executor=pb.EXECUTOR_ENGINE)
    answer = await one.ask("OpenSession", by_engine)
    assert answer[:2] == ("PERMISSION_DENIED", "TENANT_NOT_ALLOWED")
    assert isinstance(await of_all.ask("OpenSession", by_engine), pb.OpenSessionResponse)
    for read_only in (False, True):
        request = pb.OpenSessionRequest(spec=SPEC, read_only_memory=read_only)
        opened, control = await one.ask("OpenSession", request), await of_all.ask("OpenSession", request)
        for parts in (("memory",), ("memory", "step-lane"), ()):  # none: memory
            with pytest.raises(KvkeeperError, match="TENANT_NOT_ALLOWED"):
                await asyncio.to_thread(attached, opened, *parts)
        assert await asyncio.to_thread(attached, opened, "step-lane") == {"step_lane": True}  # it carries its own steps alone
        assert (await asyncio.to_thread(attached, control, "memory"))["kind"] == "memfd"


async def test_a_lane_creates_for_the_tenant_of_its_session_alone(world: World) -> None:
    opened = await world.prober(Role.ENGINE, "a").ask("OpenSession", pb.OpenSessionRequest(spec=SPEC))
    lane = LaneStream(await asyncio.to_thread(attach_lane, Session(world.api, opened)))
    new = [pb.NewSequence(sequence_id=place, token_ids=PROMPT, tenant=tenant) for place, tenant in enumerate(("", "a", "b"), 1)]
    request = pb.CreateSequencesRequest(session_id=opened.session_id, epoch=opened.epoch, sequences=new)
    await lane.write_frame(call_frame("CreateSequences", request.SerializeToString()))
    own, named, foreign = pb.CreateSequencesResponse.FromString(await lane.read()).results
    assert parse_error(foreign.error).reason == "TENANT_NOT_ALLOWED"
    assert [result.response.num_matched_tokens for result in (own, named)] == [2 * BLOCK_SIZE] * 2  # what the tenant has cached
    lane.cancel()


def attached(opened: pb.OpenSessionResponse, *parts: str) -> dict[str, object]:
    """What the attach socket hands over."""
    with attaching(opened.attach_socket_path, opened.attach_token, DEADLINE, *parts) as handed_over:
        handed_over.connection.close()
        return handed_over.fields


async def test_a_caller_of_one_tenant_replaces_no_pool(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    shown = {tenant: tokens.add(Caller(f"e{tenant}", tenant, Role.ENGINE)) for tenant in ("a", "*")}
    specs = [spec_of(revision=name) for name in "123"]
    async with serving(auth_tokens=tokens.path, num_pools=2) as api:
        one, of_all = (Prober(api, shown[tenant]) for tenant in ("a", "*"))
        for prober, spec in zip((one, of_all), specs, strict=False):
            opened = await prober.ask("OpenSession", pb.OpenSessionRequest(spec=spec))
            ids = {"session_id": opened.session_id, "epoch": opened.epoch}
            await prober.ask("CloseSession", pb.CloseSessionRequest(**ids))
        answer = await one.ask("OpenSession", pb.OpenSessionRequest(spec=specs[2]))
        assert answer[:2] == ("RESOURCE_EXHAUSTED", "OUT_OF_POOLS") and answer[3] == (("flag", "--num-pools"),)
        assert isinstance(await one.ask("OpenSession", pb.OpenSessionRequest(spec=specs[1])), pb.OpenSessionResponse)
        assert isinstance(await of_all.ask("OpenSession", pb.OpenSessionRequest(spec=specs[2])), pb.OpenSessionResponse)


@pytest.mark.parametrize("epoch", [0, 1, 2**62])
async def test_a_wrong_epoch_tells_nothing_of_a_foreign_session(world: World, epoch: int) -> None:
    prober, victim = world.prober(Role.ENGINE, "b"), world.owned["a"]
    ids = [victim.ids["session_id"], NO_SESSION]
    answers = [await prober.ask("RenewSession", pb.RenewSessionRequest(session_id=one, epoch=epoch)) for one in ids]
    assert answers[0] == answers[1]


async def test_a_session_that_ended_is_no_more_another_tenants_than_before(world: World) -> None:
    owner, other, victim = world.prober(Role.ENGINE, "a"), world.prober(Role.ENGINE, "b"), world.owned["a"]
    close = pb.CloseSessionRequest(**victim.ids, drained=True)
    assert not isinstance(await owner.ask("CloseSession", close), tuple)
    answers = [
        await other.ask("CloseSession", pb.CloseSessionRequest(session_id=one, epoch=victim.ids["epoch"], drained=True))
        for one in (victim.ids["session_id"], NO_SESSION)
    ]
    assert answers[0] == answers[1] and answers[0][1] == "UNKNOWN_SESSION"
    assert not isinstance(await owner.ask("CloseSession", close), tuple)  # a repeat of its own is answered
