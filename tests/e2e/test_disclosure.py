"""Errors, logs and metrics disclose nothing: canaries of one tenant are in no word that another one or an operator reads.

The canaries are what a service knows and must not tell: tokens and their digests, tenants, prompts, ids of sessions and
requests of another tenant, the paths of its files. A control shows that the scan finds what is there.
"""

import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.client import Credentials, GenerateOptions
from kvkeeper.client.errors import to_error
from kvkeeper.common.service.log import configure
from kvkeeper.common.trust.caller import Caller, Role
from tests.support.processes.service_pair import GREEDY, generate
from tests.support.trust.guarded_server import OURS, bearer, rpcs
from tests.support.trust.trusting_services import Trusting, trusting
from tests.support.worlds.cache_api import failure

SECRET_TENANT = "tenant-canary-4711"
SECRET_REQUEST = "request-canary-0815"
PROMPT = [31_337, 27_182, 31_415, 16_180, 14_142, 17_320, 22_360, 26_457]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Trusting]:
    async with trusting(tmp_path) as made:
        yield made


async def said_to(target: str, ca: bytes, token: str, message: bytes) -> list[str]:
    """What every call with this token and message gets, where it is refused."""
    said = []
    channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(ca))
    async with channel:
        for path, method in rpcs(OURS):
            kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
            request: Any = iter((message,)) if method.client_streaming else message
            call = getattr(channel, kind)(path)(request, timeout=5, metadata=bearer(token))
            try:
                if method.server_streaming:
                    await call.read()
                else:
                    await call
            except grpc.RpcError as error:
                refused = to_error(error)
                said.append(f"{path} {refused} {refused.metadata} {error.trailing_metadata()}")
            finally:
                call.cancel()
    return said


@pytest.fixture
def log() -> Iterator[StringIO]:
    """What both services log, in the form that they log in."""
    stream = StringIO()
    configure("debug", "both", stream)
    yield stream
    structlog.reset_defaults()


async def test_no_canary_is_in_what_is_told(log: StringIO, world: Trusting, capfd: pytest.CaptureFixture[str]) -> None:
    secret_token = world.tokens.add(Caller("secret-caller", SECRET_TENANT, Role.CLIENT))
    engine_token = world.tokens.add(Caller("secret-engine", SECRET_TENANT, Role.ENGINE))
    await world.start_cache()
    engine = await world.start_engine(gateway="off")
    await engine.wait_ready()
    victim = await world.engine_client(engine, Credentials(token=secret_token, tls_ca=world.ca_path))
    sampling = replace(GREEDY, max_tokens=200)
    await victim.submit(range(1, 9), GenerateOptions(sampling=sampling, request_id=SECRET_REQUEST))
    own_session = await world.cache_client(Credentials(token=engine_token, tls_ca=world.ca_path))
    session = await own_session.open_session(
        cache_pb.KvSpec(
            model_id="m", num_layers=1, num_kv_heads=1, head_dim=4, kv_dtype=cache_pb.KV_DTYPE_FLOAT32, block_size=4,
            layout=cache_pb.KV_LAYOUT_BLOCK_MAJOR,
        )
    )  # fmt: skip
    await session.create_sequence(1, PROMPT)

    other = world.token_file(Role.OPERATOR, "b").read_text().strip()
    messages = [
        b"",
        b"\xff" * 8,
        cache_pb.GetSequenceRequest(session_id=session.session_id, epoch=session.epoch, sequence_id=1).SerializeToString(),
        cache_pb.MatchPrefixRequest(session_id=session.session_id, epoch=session.epoch, token_ids=PROMPT).SerializeToString(),
    ]
    said = []
    for target in (world.cache.address, engine.address):
        for token in (other, secret_token[:-1] + "x", world.token_file(Role.READER, "b").read_text().strip()):
            for message in messages:
                said += await said_to(target, world.ca.pem, token, message)
    for probe in (SECRET_REQUEST, "none"):
        client = await world.engine_client(engine, world.credentials(Role.CLIENT, "b"))
        for call in (client.result(probe), client.cancel(probe)):
            refused = await failure(call)
            said.append(str(refused).replace(probe, ""))
    refused = await failure(generate(client, [1, 2, 3], tenant=SECRET_TENANT))
    said.append(str(refused))
    said += [str(sample) for family in engine.guard.metrics("") for sample in family.samples]
    logged = log.getvalue() + "".join(capfd.readouterr())
    assert len(said) > 300 and "call_refused" in logged  # neither is silent
    assert SECRET_REQUEST not in "\n".join(said)  # the log tells it to those who run the service
    everything = "\n".join(said) + logged

    digests = {hashlib.sha256(token.encode()).hexdigest() for token in (secret_token, engine_token, other)}
    paths = {str(world.tokens.path), str(world.key)}
    tokens = {secret_token, secret_token[4:], engine_token, other}
    prompts = {str(PROMPT)[1:-1], *map(str, PROMPT[:3])}
    canaries = {*tokens, *digests, *prompts, *paths, SECRET_TENANT, session.session_id}
    assert [canary for canary in canaries if canary in everything] == []
    assert "may not make this call" in everything  # the control: the scan reads what is told
