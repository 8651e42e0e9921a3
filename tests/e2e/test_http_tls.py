"""`kvkeeper http` where other hosts reach it: it speaks TLS, and serves callers whose keys the engine knows."""

import asyncio
import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http.client import HTTPException
from pathlib import Path

import pytest

from kvkeeper.common.trust.caller import Role
from tests.support.processes.service_pair import Services
from tests.support.processes.services import free_ports
from tests.support.trust.trusting_services import Trusting, trusting

BODY = {"prompt": [1, 2, 3, 4], "max_tokens": 2, "temperature": 0}
END_S = 30.0


@asynccontextmanager
async def front(world: Trusting, engine: str) -> AsyncIterator[str]:
    """The address of a front of this engine, at all addresses of the host."""
    port = free_ports()[0].rpartition(":")[2]
    flags = ("--listen", f"0.0.0.0:{port}", "--engine", engine, "--https-cert", str(world.cert), "--https-key", str(world.key))
    known = os.environ | {"KVKEEPER_TLS_CA": str(world.ca_path)}
    command = [sys.executable, "-m", "kvkeeper.cli", "http", *flags]
    process = await asyncio.to_thread(partial(subprocess.Popen, command, env=known))
    try:
        async with asyncio.timeout(END_S):
            while (await ask(world, f"https://127.0.0.1:{port}", "/version"))[0] != 200:
                assert process.poll() is None
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, END_S)


async def ask(world: Trusting, base: str, path: str = "/v1/completions", key: str | None = None) -> tuple[int, str]:
    """Status and body; 0 where there is no answer."""

    def call() -> tuple[int, str]:
        data = None if path == "/version" else json.dumps(BODY).encode()
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        context = ssl.create_default_context(cafile=str(world.ca_path))
        try:
            asked = urllib.request.Request(base + path, data, headers)
            with urllib.request.urlopen(asked, timeout=END_S, context=context) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, HTTPException):
            return 0, ""

    return await asyncio.to_thread(call)


async def test_callers_with_keys_are_served_and_no_others(tmp_path: Path) -> None:
    async with trusting(tmp_path) as world:
        await world.start_cache()
        engine = await world.start_engine()
        await engine.wait_ready()
        async with front(world, engine.address) as base:
            key = world.token_file(Role.CLIENT, "a").read_text().strip()
            status, body = await ask(world, base, key=key)
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 2)
            assert [(await ask(world, base, key=each))[0] for each in (None, "wrong")] == [401, 401]
            assert (await ask(world, base.replace("https", "http"), key=key))[0] == 0, "without TLS"


async def test_an_engine_that_asks_for_no_keys_is_not_shown_to_other_hosts(world: Services, tmp_path: Path) -> None:
    await world.start_cache()
    engine = await world.start_engine()
    async with trusting(tmp_path) as files, front(files, engine.address) as base:
        for key in (None, "any"):
            status, body = await ask(files, base, key=key)
            assert (status, "--auth-tokens" in body) == (503, True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["http", "--listen", "0.0.0.0:1"], "--listen"),
        (["http", "--https-cert", "cert.pem"], "--https-key"),
        (["serve", "--http-https-cert", "cert.pem", "--http-https-key", "key.pem"], "by itself"),
    ],
)
def test_what_would_let_in_more_than_flags_say_is_refused(flags: list[str], said: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "kvkeeper.cli", *flags], env=os.environ, capture_output=True, text=True, timeout=END_S
    )
    assert found.returncode == 2
    assert said in found.stderr
