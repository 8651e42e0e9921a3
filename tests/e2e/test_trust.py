"""Both services behind TLS and tokens: engine to cache service, engine to engine, clients, commands, Node."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.client import CacheClient, CallOptions, Credentials, EngineClient, GenerateOptions, KvkeeperError
from kvkeeper.common.trust.caller import Caller, Role
from kvkeeper.engine_service.cache_session.kv_memory import KvMemory
from tests.clients.test_node_client import run_node
from tests.support.processes.service_pair import GREEDY, generate, toy_output
from tests.support.processes.services import environment
from tests.support.trust.certificates import authority, issue
from tests.support.trust.trusting_services import Trusting, trusting
from tests.support.worlds.cache_api import SPEC, failure

PROMPT = [5, 3, 8, 1, 9, 2]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Trusting]:
    async with trusting(tmp_path) as made:
        await made.start_cache()
        yield made


async def test_a_client_with_a_token_gets_tokens_over_tls(world: Trusting) -> None:
    engine = await world.start_engine()
    await engine.wait_ready()
    client = await world.engine_client(engine, world.credentials(Role.CLIENT))
    assert (await generate(client, PROMPT)).token_ids == [toy_output(PROMPT, 8)]
    assert isinstance(engine.engine.memory, KvMemory)  # it has its session by its own token


async def test_an_engine_whose_token_has_another_role_says_so_and_does_not_serve(world: Trusting) -> None:
    engine = await world.start_engine(cache_token_file=world.token_file(Role.READER))
    with pytest.raises(Exception, match=r"ROLE_NOT_ALLOWED|may not make this call"):
        await engine.wait_ready()


async def test_a_prompt_is_computed_by_another_engine_that_asks_for_a_token(world: Trusting) -> None:
    helper = await world.start_engine(role="prefill")
    await helper.wait_ready()
    engine = await world.start_engine(role="decode", prefill=helper.address, prefill_min_tokens=2)
    await engine.wait_ready()
    client = await world.engine_client(engine, world.credentials(Role.CLIENT))
    assert (await generate(client, PROMPT)).token_ids == [toy_output(PROMPT, 8)]
    assert engine.engine.stats.num_remote_prefills == 1


async def test_an_engine_takes_over_from_one_that_asks_for_a_token(world: Trusting) -> None:
    first = await world.start_engine()
    await first.wait_ready()
    second = await world.start_engine(take_over=first.address)
    await second.wait_ready()
    await first.wait_end()
    client = await world.engine_client(second, world.credentials(Role.CLIENT))
    assert (await generate(client, PROMPT)).token_ids == [toy_output(PROMPT, 8)]


async def test_steps_go_over_both_carriers(world: Trusting) -> None:
    for carrier in ("grpc", "auto"):
        engine = await world.start_engine(step_carrier=carrier)
        await engine.wait_ready()
        client = await world.engine_client(engine, world.credentials(Role.CLIENT))
        assert (await generate(client, PROMPT)).token_ids == [toy_output(PROMPT, 8)]
        stats = await (await world.cache_client(world.credentials(Role.READER))).stats()
        kinds = {cache_pb.StepCarrier.Name(session.step_carrier) for session in stats.sessions}
        assert len(kinds) == 1 and ("LANE" in kinds.pop()) == (carrier == "auto")
        await engine.stop()


@pytest.mark.parametrize(("role", "reason"), [(Role.READER, "ROLE_NOT_ALLOWED"), (None, "NO_CREDENTIAL")])
async def test_a_caller_without_the_role_opens_no_session(world: Trusting, role: Role | None, reason: str) -> None:
    shown = Credentials(tls_ca=world.ca_path) if role is None else world.credentials(role)
    client = await world.cache_client(shown)
    refused = await failure(client.open_session(SPEC))
    assert refused.reason == reason and not refused.unavailable
    assert world.cache.session_manager.num_opened == 0


async def test_a_client_of_threads_shows_its_credentials_too(world: Trusting) -> None:
    engine = await world.start_engine()
    await engine.wait_ready()

    def work() -> tuple[list[int], int]:
        with EngineClient(engine.address, None, world.credentials(Role.CLIENT)) as client:
            sampling = replace(GREEDY, max_tokens=4)
            chunks = client.generate(PROMPT, GenerateOptions(sampling=sampling))
            tokens = [token for chunk in chunks for token in chunk.token_ids]
        with CacheClient(world.cache.address, CallOptions(), world.credentials(Role.ENGINE)) as client:
            with client.open_session(SPEC) as session:
                session.create_sequence(1, [1, 2, 3])
                (sequence,) = client.list_sequences()
        return tokens, sequence.num_tokens

    assert await asyncio.to_thread(work) == (toy_output(PROMPT, 4), 3)


@pytest.mark.parametrize(
    ("shown", "target", "said"),
    [
        (Credentials(token="kvk_x"), "10.0.0.1:1", "over TLS alone"),
        (Credentials(token="kvk_x"), "example.net:1", "over TLS alone"),
        (Credentials(tls_cert="a", tls_key="b"), "127.0.0.1:1", "over TLS alone"),
        (Credentials(tls_ca="/none"), "127.0.0.1:1", "No such file"),
        (Credentials(tls_ca=__file__, tls_cert=__file__), "127.0.0.1:1", "go together"),
    ],
)
def test_what_cannot_be_shown_safely_is_refused_before_a_connection(shown: Credentials, target: str, said: str) -> None:
    with pytest.raises(KvkeeperError, match=said) as refused:
        CacheClient(target, None, shown)
    assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED and "kvk_x" not in str(refused.value)


def test_a_token_is_in_no_text_of_its_credentials() -> None:
    assert "secret" not in repr(Credentials(token="secret"))


async def test_a_certificate_stands_for_its_entry(world: Trusting, tmp_path: Path) -> None:
    folder = tmp_path / "mtls"
    folder.mkdir()
    async with trusting(folder) as other:
        other.tokens.certify("dash.example", Caller("dash.example", "*", Role.READER))
        cert, key = issue("dash", other.ca, names=["dash.example"]).write(folder, "dash")
        await other.start_cache(tls_client_ca=other.ca_path)
        client = await other.cache_client(Credentials(tls_ca=other.ca_path, tls_cert=cert, tls_key=key))
        await client.stats()
        with pytest.raises(KvkeeperError, match="ROLE_NOT_ALLOWED"):
            await client.open_session(SPEC)
        cert, key = issue("dash", authority(), names=["dash.example"]).write(folder, "wrong")
        wrong = await other.cache_client(Credentials(tls_ca=other.ca_path, tls_cert=cert, tls_key=key))
        refused = await failure(wrong.stats())
        assert refused.service_down


async def test_commands_show_credentials_by_flag_and_by_variable(world: Trusting, tmp_path: Path) -> None:
    token = world.token_file(Role.READER)

    def ask(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvkeeper.cli", "sequences", "--cache", world.cache.address, "--json", *flags]
        return subprocess.run(command, env=environment(tmp_path) | variables, capture_output=True, text=True, timeout=60)

    by_flag = await asyncio.to_thread(ask, "--tls-ca", str(world.ca_path), "--token-file", str(token))
    assert (by_flag.returncode, by_flag.stderr) == (0, "")
    by_variable = await asyncio.to_thread(ask, KVKEEPER_TLS_CA=str(world.ca_path), KVKEEPER_TOKEN_FILE=str(token))
    assert by_variable.stdout == by_flag.stdout
    without = await asyncio.to_thread(ask, "--tls-ca", str(world.ca_path))
    assert without.returncode == 1
    assert json.loads(without.stderr)["error"]["reason"] == "NO_CREDENTIAL"


async def test_the_node_client_shows_its_credentials(world: Trusting) -> None:
    token = world.token_file(Role.READER)
    await run_node(
        "credentials.test.js",
        KVKEEPER_CACHE_LISTEN=world.cache.address.replace("127.0.0.1", "localhost"),
        TEST_CA=str(world.ca_path),
        TEST_TOKEN_FILE=str(token),
        TEST_TOKEN=token.read_text().strip(),
        TEST_OTHER_FILE=str(world.token_file(Role.CLIENT)),
    )
