"""What clients send is neither told nor run: right and wrong calls of every kind, whose contents are canaries.

Real processes with their most talkative log. Promise 33: no log, metric or error shows a prompt, an output, a tenant, a session
of the cache service, an attach token or a path. Promise 36: nothing that clients send becomes code.
"""

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as cache_pb
from kvkeeper.client import (
    AsyncCacheClient,
    AsyncCacheSession,
    AsyncEngineClient,
    BeamSearch,
    CallOptions,
    GenerateOptions,
    KvkeeperError,
    Sampling,
)
from kvkeeper.client.kv_chunks import KvTokens
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.processes.audited_process import AUDITED
from tests.support.processes.fleet import DEADLINE_S, Fleet, fleet
from tests.support.processes.services import free_ports
from tests.support.worlds.cache_api import SPEC

CANARY = "canary"
PROMPT, TENANT, OTHER, STOP = f"{CANARY}-prompt", f"{CANARY}-tenant", f"{CANARY}-other-tenant", f"{CANARY}-stop"
WORKER = "-m kvkeeper.engine_service.text_workers.text_worker"  # the one command that an engine runs


class Bomb:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return print, (f"{CANARY}-unpickled",)


CODE = pickle.dumps(Bomb())


@dataclass
class Delivered:
    """All that both services said."""

    logs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)  # that nothing above may show
    num_answers: int = 0

    async def call(self, awaited: Awaitable[Any]) -> Any:
        """What it answers; None where it was refused, which is noted."""
        try:
            answer = await awaited
        except KvkeeperError as error:
            self.errors.append(f"{error} {error.metadata}")
            return None
        self.num_answers += 1
        return answer


@pytest.fixture(scope="module")
def told() -> Delivered:
    return asyncio.run(_busy_day())


async def _busy_day() -> Delivered:
    found = Delivered()
    wrapper = "tests.support.processes.audited_process"
    addresses = free_ports()
    engine = {"model": str(DEMO_MODEL_DIR), "block_size": 16, "log_level": "debug", "metrics_listen": addresses[1]}
    cache = {"num_blocks": 256, "num_pools": 2, "log_level": "debug", "metrics_listen": addresses[0], "logits_memory": "1MiB"}
    async with fleet(1, cache, wrapper=wrapper, **engine) as services:
        options = CallOptions(timeout_s=DEADLINE_S, retry_s=0)
        async with AsyncEngineClient(services.engine_addresses[0], options) as client:
            await _use_engine(client, found)
        async with AsyncCacheClient(services.cache_address, options) as cache_client:
            await _use_cache(cache_client, found)
        found.secrets.append(str(services.folder / "run"))
        found.metrics += [await _scrape(address) for address in addresses]
        await _end(services)
        found.logs = [line for service in (services.cache, *services.engines) for line in service.lines]
    return found


async def _use_engine(client: AsyncEngineClient, found: Delivered) -> None:
    async def generate(prompt: Any, **fields: Any) -> None:
        options = GenerateOptions(**({"tenant": TENANT, "request_id": "r"} | fields))
        await found.call(_read(client.generate(prompt, options)))

    for sampling in (
        {}, {"temperature": 0.7, "num_logprobs": 2}, {"stop": (STOP,)}, {"regex": f"{CANARY}-[a-z]+"}, {"regex": f"({CANARY}"},
        {"json_schema": json.dumps({"const": f"{CANARY}-const"})}, {"json_schema": f"{{{CANARY}"},
        {"choices": (f"{CANARY}-choice",)},
        {"top_p": 7.0}, {"num_logprobs": -1}, {"seed": 1 << 70},
    ):  # fmt: skip
        await _or_value_error(generate(PROMPT, sampling=Sampling(max_tokens=8, **sampling)))
    await generate(PROMPT, sampling=Sampling(max_tokens=4), beam_search=BeamSearch(2), n=2)
    await generate(PROMPT * 10_000)
    await generate(PROMPT, tenant=TENANT * 20)
    await generate(CODE.hex())
    await generate([1, 2, 1 << 30])
    await generate([])
    for tenant in (TENANT, OTHER):
        await found.call(client.submit(PROMPT, GenerateOptions(request_id="shared", tenant=tenant)))
    await found.call(client.result("shared", wait_s=DEADLINE_S))  # else the engine keeps it for a while when it ends
    for call in (client.result, client.cancel):
        await found.call(call(f"{CANARY}-unknown"))
    found.secrets += [STOP, TENANT, OTHER, f"{CANARY}-choice", f"{CANARY}-const", PROMPT]


async def _use_cache(client: AsyncCacheClient, found: Delivered) -> None:
    one: AsyncCacheSession = await client.open_session(SPEC, client_name="one")
    other: AsyncCacheSession = await client.open_session(SPEC, client_name="other")
    for session in (one, other):
        found.secrets += [session.session_id, session._opened.attach_token]
    found.secrets.append(one._opened.attach_socket_path)
    await found.call(one.create_sequence(1, [7, 8, 9, 10, 11], tenant=TENANT))
    await found.call(one.create_sequence(1, [7, 8], tenant=OTHER))
    await found.call(other.create_sequence(1, [7, 8, 9, 10, 11], tenant=OTHER))
    await found.call(other.release(99))
    await found.call(one.extend(1, 5))
    kv = np.resize(np.frombuffer(CODE[: len(CODE) // 4 * 4], np.float32), (2, 5, 1, 3))
    await found.call(one.write_kv(1, 0, KvTokens(kv, kv)))
    await found.call(one.match_prefix([7, 8, 9], tenant=TENANT * 50))
    await found.call(one.pin_prefix([7, 8, 9, 10], 1000, tenant=OTHER))
    await found.call(one.unpin_prefix(f"{CANARY}-pin"))
    await found.call(one.take(CODE[:16], 2))
    await found.call(one.store_logits(1, 4, kv.ravel()))
    stolen = cache_pb.OpenSessionResponse(session_id=one.session_id, epoch=1, pool=one.pool)
    await found.call(AsyncCacheSession(client._transport, stolen).renew())
    arena = await one.attach()
    arena.close()
    await found.call(one.attach())  # a token is good once
    await found.call(one.close())
    await found.call(one.renew())


async def _read(chunks: AsyncIterator[Any]) -> list[Any]:
    return [chunk async for chunk in chunks]


async def _or_value_error(call: Awaitable[None]) -> None:
    """Some values do not even fit the message."""
    try:
        await call
    except (ValueError, TypeError):
        return


async def _scrape(address: str) -> str:
    """A service's metrics."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


async def _end(services: Fleet) -> None:
    for service in (*services.engines, services.cache):
        service.terminate()
        assert await service.end() == 0


def test_most_calls_were_answered_and_many_refused(told: Delivered) -> None:
    assert told.num_answers > 10
    assert len(told.errors) > 12
    assert all("kvkeeper_" in text for text in told.metrics)


def test_no_log_and_no_metric_shows_what_clients_sent(told: Delivered) -> None:
    for line in (*told.logs, *told.metrics):
        assert CANARY not in line
        assert not [secret for secret in told.secrets if secret in line]


def test_no_error_shows_a_secret_or_another_tenant(told: Delivered) -> None:
    for text in told.errors:
        assert not [secret for secret in told.secrets if secret in text], text


def test_nothing_that_clients_send_becomes_code(told: Delivered) -> None:
    audited = [json.loads(line) for line in told.logs if f'"{AUDITED}"' in line]
    kinds = {(event["kind"], event["what"].partition(" ")[2]) for event in audited}
    assert kinds == {("subprocess.Popen", WORKER)}, (
        "constraints are compiled in processes of their own, and nothing else is run"
    )
