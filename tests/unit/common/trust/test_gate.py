"""Only valid credentials get in: tokens and certificates that are wrong in many ways, at every RPC, enter no handler."""

import base64
import datetime
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from kvkeeper.common.trust.caller import Caller, Role
from kvkeeper.common.trust.credentials import hash_token, make_token
from kvkeeper.common.trust.gate import CERTIFIED, SOCKET_OWNER
from kvkeeper.common.trust.roles import OPEN
from tests.support.trust.certificates import SERVER_NAMES, Certificate, authority, issue
from tests.support.trust.guarded_server import (
    DEADLINE_S,
    Config,
    GuardedServer,
    TokenFile,
    bearer,
    guarded_server,
    raw_call,
    rpcs,
)

DAY = datetime.timedelta(days=1)
OPERATOR = Caller("operator", "*", Role.OPERATOR)
NAMED = Caller("operator.example", "*", Role.OPERATOR)  # by a certificate
STEP = "/kvkeeper.cache.v1.CacheService/Step"
CLOSED = [(path, method) for path, method in rpcs() if path not in OPEN]
FIRST = dict(CLOSED)[STEP]

# What is wrong with the metadata of a call, from the one good token.
WRONG_METADATA: dict[str, Callable[[str], Any]] = {
    "no metadata": lambda token: None,
    "an empty token": lambda token: bearer(""),
    "another token": lambda token: bearer(make_token()),
    "cut short": lambda token: bearer(token[:-1]),
    "one more letter": lambda token: bearer(token + "A"),
    "the last letter changed": lambda token: bearer(token[:-1] + ("A" if token[-1] != "A" else "B")),
    "the first letter changed": lambda token: bearer(token[:4] + ("A" if token[4] != "A" else "B") + token[5:]),
    "upper case": lambda token: bearer(token.upper()),
    "without its prefix": lambda token: bearer(token.removeprefix("kvk_")),
    "another prefix": lambda token: bearer(token.replace("kvk_", "sk-", 1)),
    "its prefix twice": lambda token: bearer("kvk_" + token),
    "a space before it": lambda token: bearer(" " + token),
    "a colon after the scheme": lambda token: (("authorization", f"Bearer: {token}"),),
    "quoted": lambda token: bearer(f'"{token}"'),
    "encoded once more": lambda token: bearer(base64.b64encode(token.encode()).decode()),
    "its digest": lambda token: bearer(hash_token(token).hex()),
    "its digest as a token": lambda token: bearer("kvk_" + base64.urlsafe_b64encode(hash_token(token)).decode().rstrip("=")),
    "an asterisk": lambda token: bearer("*"),
    "very long": lambda token: bearer(token * 40),
    "two of them in one value": lambda token: bearer(f"{token}, {token}"),
    "good, then wrong": lambda token: bearer(token) + bearer(make_token()),
    "wrong, then good": lambda token: bearer(make_token()) + bearer(token),
    "twice": lambda token: bearer(token) * 2,
    "without a scheme": lambda token: (("authorization", token),),
    "the scheme alone": lambda token: (("authorization", "Bearer"),),
    "scheme Basic": lambda token: (("authorization", "Basic " + base64.b64encode(f"user:{token}".encode()).decode()),),
    "scheme Token": lambda token: (("authorization", f"Token {token}"),),
    "under another key": lambda token: (("x-api-key", token),),
    "under a key that is like it": lambda token: (("authorization2", f"Bearer {token}"),),
    "as binary metadata": lambda token: (("authorization-bin", f"Bearer {token}".encode()),),
    "as a proxy's": lambda token: (("proxy-authorization", f"Bearer {token}"),),
    "the name of a caller": lambda token: bearer(OPERATOR.name),
    "a role as metadata": lambda token: (("role", "operator"), ("tenant", "*")),
    "a certificate as metadata": lambda token: (("x-forwarded-client-cert", "CN=operator"),),
}


@dataclass(frozen=True)
class Chain:
    """What a client shows when it connects, and the authority that it trusts."""

    shown: Certificate | None
    trusts: Certificate


@dataclass(frozen=True)
class World:
    """The service's authority and the good client."""

    ca: Certificate
    server: Certificate
    client: Certificate


def _world() -> World:
    ca = authority("clients")
    return World(ca, issue("service", ca, names=SERVER_NAMES), issue("client", ca, names=["operator.example"]))


# Certificates with which no connection comes about.
WRONG_CERTIFICATES: dict[str, Callable[[World], Certificate | None]] = {
    "none": lambda world: None,
    "expired": lambda world: issue("c", world.ca, names=["operator.example"], begins=-2 * DAY, ends=-DAY),
    "not valid yet": lambda world: issue("c", world.ca, names=["operator.example"], begins=DAY, ends=2 * DAY),
    "of another authority": lambda world: issue("c", authority("others"), names=["operator.example"]),
    "of an authority of the same name": lambda world: issue("c", authority("clients"), names=["operator.example"]),
    "signed by itself": lambda world: issue("c", None, names=["operator.example"]),
    "signed by a client": lambda world: issue("c", world.client, names=["operator.example"]),
    "signed with another key": lambda world: issue(
        "c", world.ca, names=["operator.example"], signed_with=ec.generate_private_key(ec.SECP256R1())
    ),
    "under the authority's name": lambda world: issue("c", None, names=["operator.example"], issuer_name="clients"),
    "of an unknown intermediate": lambda world: issue("c", authority("between", issuer=world.ca), names=["operator.example"]),
    "for servers": lambda world: issue("c", world.ca, names=["operator.example"], usage="server"),
    "with an unknown critical extension": lambda world: issue(
        "c", world.ca, names=["operator.example"], critical_extension=True
    ),
    "of an expired authority's kind": lambda world: issue(
        "c", authority("old", begins=-2 * DAY, ends=-DAY), names=["operator.example"]
    ),
}

# Certificates of the right authority whose names stand for no caller, or for more than one.
WRONG_NAMES: dict[str, Callable[[World], Certificate]] = {
    "another name": lambda world: issue("c", world.ca, names=["other.example"]),
    "its name as common name beside others": lambda world: issue("operator.example", world.ca, names=["other.example"]),
    "a name below it": lambda world: issue("c", world.ca, names=["sub.operator.example"]),
    "a wildcard": lambda world: issue("c", world.ca, names=["*.example"]),
    "upper case": lambda world: issue("c", world.ca, names=["OPERATOR.EXAMPLE"]),
    "a name that goes on": lambda world: issue("c", world.ca, names=["operator.example.org"]),
    "a common name that goes on behind a zero byte": lambda world: issue("operator.example\0.org", world.ca),
    "a name that goes on behind a zero byte": lambda world: issue("c", world.ca, names=["operator.example\0.org"]),
    "a URI that goes on behind a zero byte": lambda world: issue("c", world.ca, names=["spiffe://example/op\0/other"]),
    "a zero byte in the name of another": lambda world: issue("c", world.ca, names=["x.org", "operator.example\0.org"]),
    "no name": lambda world: issue("", world.ca),
    "names of two callers": lambda world: issue("c", world.ca, names=["operator.example", "reader.example"]),
    "an address": lambda world: issue("c", world.ca, names=["10.0.0.1"]),
}


def config_of(folder: Path, world: World, tokens: TokenFile | None = None, *, client_ca: bool = False) -> Config:
    cert, key = world.server.write(folder, "server")
    (folder / "ca.pem").write_bytes(world.ca.pem)
    return Config(
        tls_cert=cert,
        tls_key=key,
        tls_client_ca=folder / "ca.pem" if client_ca else None,
        auth_tokens=tokens.path if tokens else None,
    )


def tls_channel(server: GuardedServer, trusts: Certificate, shown: Certificate | None = None) -> grpc.aio.Channel:
    key, chain = (shown.key_pem, shown.pem) if shown else (None, None)
    credentials = grpc.ssl_channel_credentials(trusts.pem, key, chain)
    return grpc.aio.secure_channel(server.address, credentials, [("grpc.use_local_subchannel_pool", 1)])


def test_there_are_forty_ways_and_more() -> None:
    assert len(WRONG_METADATA) + len(WRONG_CERTIFICATES) + len(WRONG_NAMES) >= 50


@pytest.mark.parametrize("way", WRONG_METADATA)
async def test_no_wrong_token_enters_a_handler(tmp_path: Path, way: str) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    good = tokens.add(OPERATOR)
    metadata = WRONG_METADATA[way](good)
    async with guarded_server(Config(auth_tokens=tokens.path)) as server, grpc.aio.insecure_channel(server.address) as channel:
        for path, method in CLOSED:
            error = await raw_call(channel, path, method, metadata, b"\xff" * 64)
            assert error is not None and error.code is grpc.StatusCode.UNAUTHENTICATED, path
            assert error.reason in ("NO_CREDENTIAL", "WRONG_CREDENTIAL"), path
            assert good not in str(error)
        assert server.entered == {}
        assert server.guard.refused.counts.total() == len(CLOSED)
        assert await raw_call(channel, STEP, FIRST, bearer(good)) is None  # the control
        assert server.entered == {(STEP, OPERATOR): 1}


@pytest.mark.parametrize("way", WRONG_CERTIFICATES)
async def test_no_wrong_certificate_gets_a_connection(tmp_path: Path, way: str) -> None:
    world = _world()
    shown = WRONG_CERTIFICATES[way](world)
    async with guarded_server(config_of(tmp_path, world, client_ca=True)) as server:
        async with tls_channel(server, world.ca, shown) as channel:
            for path, method in (*CLOSED, *((path, method) for path, method in rpcs() if path in OPEN)):
                error = await raw_call(channel, path, method)
                assert error is not None and error.code is grpc.StatusCode.UNAVAILABLE, path
        assert server.entered == {}
        async with tls_channel(server, world.ca, world.client) as channel:
            assert await raw_call(channel, STEP, FIRST) is None  # the control
        assert server.entered == {(STEP, CERTIFIED): 1}


@pytest.mark.parametrize("way", WRONG_NAMES)
async def test_no_wrong_name_of_a_certificate_enters_a_handler(tmp_path: Path, way: str) -> None:
    world, tokens = _world(), TokenFile(tmp_path / "tokens")
    tokens.certify("operator.example", NAMED)
    tokens.certify("reader.example", Caller("reader", "*", Role.READER))
    tokens.certify("spiffe://example/op", Caller("op", "*", Role.OPERATOR))
    shown = WRONG_NAMES[way](world)
    async with guarded_server(config_of(tmp_path, world, tokens, client_ca=True)) as server:
        async with tls_channel(server, world.ca, shown) as channel:
            for path, method in CLOSED:
                error = await raw_call(channel, path, method, None, b"\xff" * 64)
                assert error is not None, path
                assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "WRONG_CREDENTIAL"), path
        assert server.entered == {}
        async with tls_channel(server, world.ca, world.client) as channel:
            for path, method in CLOSED:  # the control
                error = await raw_call(channel, path, method)
                assert error is None or error.code is grpc.StatusCode.UNIMPLEMENTED, path
        assert server.entered[STEP, NAMED] == 1


@pytest.mark.parametrize("way", ["no TLS", "another authority", "another name"])
async def test_a_client_gets_no_connection_to_something_else(tmp_path: Path, way: str) -> None:
    world = _world()
    if way == "another name":
        world = replace(world, server=issue("service", world.ca, names=["elsewhere.example"]))
    trusts = authority("others") if way == "another authority" else world.ca
    async with guarded_server(config_of(tmp_path, world, client_ca=True)) as server:
        plain = grpc.aio.insecure_channel(server.address)
        async with plain if way == "no TLS" else tls_channel(server, trusts, world.client) as channel:
            error = await raw_call(channel, STEP, FIRST)
            assert error is not None and error.code is grpc.StatusCode.UNAVAILABLE
        assert server.entered == {}


async def test_bytes_that_are_no_handshake_enter_no_handler(tmp_path: Path) -> None:
    world = _world()
    async with guarded_server(config_of(tmp_path, world, client_ca=True)) as server:
        host, _, port = server.address.rpartition(":")
        for sent in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", b"\0" * 4096):
            with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
                connection.sendall(sent)
        async with tls_channel(server, world.ca, world.client) as channel:
            assert await raw_call(channel, STEP, FIRST) is None
        assert server.entered == {(STEP, CERTIFIED): 1}


async def test_a_wrong_token_is_not_made_good_by_a_certificate(tmp_path: Path) -> None:
    world, tokens = _world(), TokenFile(tmp_path / "tokens")
    tokens.certify("operator.example", NAMED)
    reader = Caller("reader", "acme", Role.READER)
    token = tokens.add(reader)
    async with guarded_server(config_of(tmp_path, world, tokens, client_ca=True)) as server:
        async with tls_channel(server, world.ca, world.client) as channel:
            error = await raw_call(channel, STEP, FIRST, bearer(make_token()))
            assert error is not None and error.reason == "WRONG_CREDENTIAL"
            error = await raw_call(channel, STEP, FIRST, bearer(token))  # the token's caller, not the certificate's
            assert error is not None and error.reason == "ROLE_NOT_ALLOWED"
            assert await raw_call(channel, STEP, FIRST) is None
    assert server.entered == {(STEP, NAMED): 1}


async def test_a_token_means_nothing_where_there_is_no_file_of_tokens(tmp_path: Path) -> None:
    world = _world()
    async with guarded_server(config_of(tmp_path, world, client_ca=True)) as server:
        async with tls_channel(server, world.ca, world.client) as channel:
            error = await raw_call(channel, STEP, FIRST, bearer(make_token()))
    assert error is not None and error.reason == "WRONG_CREDENTIAL"
    assert server.entered == {}


@pytest.mark.parametrize("common_name", ["operator.example", "x"])
async def test_a_common_name_counts_where_there_is_no_other_name(tmp_path: Path, common_name: str) -> None:
    world, tokens = _world(), TokenFile(tmp_path / "tokens")
    tokens.certify("operator.example", NAMED)
    async with guarded_server(config_of(tmp_path, world, tokens, client_ca=True)) as server:
        async with tls_channel(server, world.ca, issue(common_name, world.ca)) as channel:
            error = await raw_call(channel, STEP, FIRST)
    assert (error is None) == (common_name == "operator.example")


async def test_a_uri_is_a_name_of_a_certificate(tmp_path: Path) -> None:
    world, tokens = _world(), TokenFile(tmp_path / "tokens")
    tokens.certify("spiffe://example/engine", OPERATOR)
    async with guarded_server(config_of(tmp_path, world, tokens, client_ca=True)) as server:
        async with tls_channel(server, world.ca, issue("x", world.ca, names=["spiffe://example/engine"])) as channel:
            assert await raw_call(channel, STEP, FIRST) is None


async def test_over_tls_tokens_are_asked_for_as_without(tmp_path: Path) -> None:
    world, tokens = _world(), TokenFile(tmp_path / "tokens")
    token = tokens.add(OPERATOR)
    async with guarded_server(config_of(tmp_path, world, tokens)) as server:
        async with tls_channel(server, world.ca) as channel:
            error = await raw_call(channel, STEP, FIRST)
            assert error is not None and error.reason == "NO_CREDENTIAL"
            assert await raw_call(channel, STEP, FIRST, bearer(token)) is None


async def test_the_user_of_a_socket_is_its_operator_without_a_token_and_its_file_is_private(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    reader = Caller("reader", "*", Role.READER)
    token = tokens.add(reader)
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        async with guarded_server(Config(listen=f"unix:{folder}/s", auth_tokens=tokens.path)) as server:
            assert stat.S_IMODE(os.stat(f"{folder}/s").st_mode) == 0o600
            async with grpc.aio.insecure_channel(server.address) as channel:
                assert await raw_call(channel, STEP, FIRST) is None
                errors = [await raw_call(channel, STEP, FIRST, bearer(shown)) for shown in (token, make_token())]
    assert [error.reason if error else None for error in errors] == ["ROLE_NOT_ALLOWED", "WRONG_CREDENTIAL"]
    assert server.entered == {(STEP, SOCKET_OWNER): 1}


async def test_without_tokens_and_authority_every_program_of_the_host_is_let_in() -> None:
    async with guarded_server(Config()) as server, grpc.aio.insecure_channel(server.address) as channel:
        assert not server.guard.has_gate
        for path, method in CLOSED:
            error = await raw_call(channel, path, method)
            assert error is None or error.code is grpc.StatusCode.UNIMPLEMENTED, path


async def test_a_refusal_is_logged_once_a_second_and_without_secrets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    tokens.add(OPERATOR)
    wrong = make_token()
    async with guarded_server(Config(auth_tokens=tokens.path)) as server, grpc.aio.insecure_channel(server.address) as channel:
        for _ in range(5):
            await raw_call(channel, STEP, FIRST, bearer(wrong))
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/a.Secret/Name")(b"", metadata=bearer(wrong), timeout=DEADLINE_S)
        (family,) = server.guard.metrics("kvkeeper_cache_")
    said = "".join(capsys.readouterr())
    assert said.count("call_refused") in (1, 2)
    assert wrong not in said and "Secret" not in said and wrong[4:] not in said
    assert {sample.labels["reason"]: sample.value for sample in family.samples} == {
        "no_credential": 0,
        "wrong_credential": 6,
        "role_not_allowed": 0,
        "tenant_not_allowed": 0,
    }


async def test_certificates_are_exchanged_without_a_restart(tmp_path: Path) -> None:
    world, other = _world(), _world()
    async with guarded_server(config_of(tmp_path, world, client_ca=True)) as server:
        async with tls_channel(server, world.ca, world.client) as old:
            assert await raw_call(old, STEP, FIRST) is None
            config_of(tmp_path, replace(other, server=world.server), client_ca=True)  # a key that is not there yet
            (tmp_path / "server.pem").write_bytes(other.server.pem)
            async with tls_channel(server, world.ca, world.client) as channel:
                assert await raw_call(channel, STEP, FIRST) is None
            config_of(tmp_path, other, client_ca=True)
            async with tls_channel(server, other.ca, other.client) as channel:
                assert await raw_call(channel, STEP, FIRST) is None
            async with tls_channel(server, other.ca, world.client) as channel:
                error = await raw_call(channel, STEP, FIRST)
                assert error is not None and error.code is grpc.StatusCode.UNAVAILABLE
            assert await raw_call(old, STEP, FIRST) is None  # a connection continues with what it was made with
