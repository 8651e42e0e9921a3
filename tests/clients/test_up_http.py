"""`kvkeeper up --http`: a front that dies takes its streams along and nothing else, and is soon back."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from kvkeeper.client import CallOptions, EngineClient, GenerateOptions, Sampling
from tests.support.processes.services import Services, environment, free_ports, services_up, short_folder, sockets_in

pytestmark = pytest.mark.in_turn

END_S = 30.0
LONG = {"prompt": "def", "max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.fixture(params=[1, 2], ids=["one", "two"])
def services(request: pytest.FixtureRequest) -> Iterator[Services]:
    """With so many processes that speak HTTP."""
    (address, _) = free_ports()
    with short_folder() as folder:
        flags = ("--http", address, "--http-workers", str(request.param))
        with services_up(folder, *sockets_in(folder), *flags) as running:
            yield running


def ask(services: Services, path: str, body: dict[str, Any] | None = None) -> Any:
    """The open answer. Raises OSError."""
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(f"{services.ready['http'].removesuffix('/v1')}{path}", data, timeout=END_S)


def processes(services: Services) -> list[int]:
    """Of the front: the one that `up` started, and those below it."""

    def below(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    (front,) = [pid for pid in below(services.process.pid) if b"\0http\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return [front, *below(front)]


def wait_for_end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            assert select.select([descriptor], [], [], END_S)[0], f"process {pid} is still there"
        finally:
            os.close(descriptor)


def test_a_front_that_is_killed_ends_its_streams_and_is_soon_back(services: Services) -> None:
    assert ask(services, "/v1/models").status == 200
    with EngineClient(services.engine, CallOptions(timeout_s=END_S)) as client:
        submitted = client.submit("def", GenerateOptions(sampling=Sampling(max_tokens=400, ignore_eos=True)))
        with ask(services, "/v1/completions", LONG) as stream:
            first = stream.readline()
            assert first.startswith(b"data: {")
            pids = processes(services)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            rest = b""
            with contextlib.suppress(OSError, HTTPException):
                rest = stream.read()
            assert b"[DONE]" not in rest
        for pid in pids:
            wait_for_end(pid)
        latest = time.monotonic() + END_S
        while True:
            try:
                assert ask(services, "/health").status == 200
                break
            except OSError:
                assert time.monotonic() < latest, "the front is not back"
        assert not set(processes(services)) & set(pids)
        assert client.result(submitted, wait_s=END_S).usage.new_tokens == 400  # type: ignore[union-attr]
        assert json.loads(ask(services, "/v1/completions", {**LONG, "stream": False, "max_tokens": 2}).read())["choices"]


def test_metrics_are_those_of_all_processes(services: Services) -> None:
    for _ in range(8):
        ask(services, "/v1/models").read()
    page = ask(services, "/metrics").read().decode()
    assert 'kvkeeper_http_requests_total{path="/v1/models",status="200"} 8.0' in page


def test_a_signal_ends_all_and_leaves_no_process(services: Services) -> None:
    pids = processes(services)
    services.process.send_signal(signal.SIGINT)
    assert services.process.wait(END_S) == 130
    for pid in pids:
        wait_for_end(pid)
    assert services.log_path.read_text().splitlines()[-1] == "kvkeeper: stopped; all services have ended"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--listen", "0.0.0.0:8000"), "loopback"),
        (("--listen", ""), "--listen"),
        (("--workers", "0"), "--workers"),
        (("--response-form", "nothing"), "nothing"),
        (("--response-template", "/nowhere/template.json"), "--response-template: [Errno 2]"),
        (("--response-template", "{folder}/wrong.json"), "--response-template: no response template: field 'audio' is none of"),
        (("--response-template", "{folder}/wrong.json", "--response-form", "qwen"), "one of them"),
        (("--token-file", "x"), "--token-file"),
    ],
)
def test_wrong_flags_of_the_front_are_named(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    (tmp_path / "wrong.json").write_text('{"start_anchor": "x", "fields": {"audio": {}}}')
    command = [sys.executable, "-m", "kvkeeper.cli", "http", *(flag.format(folder=tmp_path) for flag in flags)]
    found = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=END_S)
    assert (found.returncode, said in found.stderr) == (2, True), found.stderr


def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "kvkeeper.cli", "http", "--listen", address]
        found = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=END_S)
    assert (found.returncode, address in found.stderr, "Traceback" in found.stderr) == (1, True, False), found.stderr


def test_without_the_extra_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['uvicorn'] = None\n")
    env = {**environment(tmp_path), "PYTHONPATH": f"{tmp_path}:{environment(tmp_path)['PYTHONPATH']}"}
    for command in (("http",), ("serve",), ("up", "--http")):
        found = subprocess.run(
            [sys.executable, "-m", "kvkeeper.cli", *command], env=env, capture_output=True, text=True, timeout=END_S
        )
        assert (found.returncode, found.stderr.count("\n")) == (1, 1), found.stderr
        assert "[http]" in found.stderr
