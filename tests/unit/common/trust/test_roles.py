"""The table of roles holds every RPC of every descriptor, and the gate does what each of its cells says."""

from pathlib import Path

import grpc
import pytest

from kvkeeper.common.trust.caller import Caller, Role
from kvkeeper.common.trust.roles import OPEN, TABLE, get_roles, is_known
from tests.support.trust.guarded_server import Config, GuardedServer, TokenFile, bearer, guarded_server, raw_call, rpcs

HEALTH, REFLECTION = "/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/"


def test_the_table_has_a_row_for_every_rpc_and_no_other() -> None:
    of_descriptors = {path for path, _ in rpcs()}
    of_table = {f"/{service}/{name}" for service, methods in TABLE.items() for name in methods}
    assert len(of_descriptors) > 60
    assert of_table | OPEN == of_descriptors
    assert not of_table & OPEN


def test_what_is_open_to_all_is_health_alone() -> None:
    assert {path for path, _ in rpcs() if path in OPEN} == {path for path, _ in rpcs() if path.startswith(HEALTH)}


@pytest.mark.parametrize("path", ["/kvkeeper.cache.v1.CacheService/New", "/other.Service/Step", "", "Step"])
def test_a_call_without_a_row_is_refused_to_every_role(path: str) -> None:
    assert get_roles(path) == frozenset()
    assert not is_known(path)


def test_a_reader_changes_nothing() -> None:
    reading = {path for path, _ in rpcs() if Role.READER in get_roles(path)}
    verbs = (
        "Get",
        "List",
        "Read",
        "Watch",
        "Match",
        "Explain",
        "Subscribe",
        "CheckAdmission",
        "HealthCheck",
        "ServerReflection",
    )
    others = [path for path in reading if not path.rpartition("/")[2].startswith(verbs)]
    assert reading
    assert others == [], "a name that does not say that the call only reads"


def test_an_operator_may_make_every_call() -> None:
    assert [path for path, _ in rpcs() if path not in OPEN and Role.OPERATOR not in get_roles(path)] == []


@pytest.mark.parametrize("role", Role)
async def test_every_cell_is_what_the_gate_does(tmp_path: Path, role: Role) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    caller = Caller("someone", "*", role)
    token = tokens.add(caller)
    let_in, kept_out = 0, 0
    async with guarded_server(Config(auth_tokens=tokens.path)) as server, grpc.aio.insecure_channel(server.address) as channel:
        for path, method in rpcs():
            error = await raw_call(channel, path, method, bearer(token))
            if path in OPEN or role in get_roles(path):
                let_in += 1
                assert error is None or error.reason == "", path
                assert path.startswith((HEALTH, REFLECTION)) or server.entered[path, caller] == 1, path
            else:
                kept_out += 1
                assert error is not None, path
                assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_ALLOWED"), path
                assert error.metadata == {"role": role.value}
                assert server.entries(path) == 0, path
        assert server.guard.refused.counts == ({"ROLE_NOT_ALLOWED": kept_out} if kept_out else {})
    assert let_in > 10 and (kept_out > 10) == (role is not Role.OPERATOR)


async def test_reflection_and_unknown_calls_need_a_credential_and_health_needs_none(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    tokens.add(Caller("op", "*", Role.OPERATOR))
    async with guarded_server(Config(auth_tokens=tokens.path)) as server, grpc.aio.insecure_channel(server.address) as channel:
        refused = []
        for path, method in rpcs():
            error = await raw_call(channel, path, method)
            if path.startswith(HEALTH):
                assert error is None or error.code is grpc.StatusCode.UNIMPLEMENTED
            else:
                assert error is not None and error.reason == "NO_CREDENTIAL", path
                refused.append(path)
        assert len(refused) == len([path for path, _ in rpcs() if path not in OPEN])
        assert server.entered == {}


async def test_an_unknown_call_is_refused_before_it_is_looked_up(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    token = tokens.add(Caller("op", "*", Role.OPERATOR))
    async with guarded_server(Config(auth_tokens=tokens.path)) as server:
        await _refuses_unknown(server, token)


async def _refuses_unknown(server: GuardedServer, token: str) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/other.Service/Method")(b"", metadata=bearer(token), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
