"""`kvkeeper up` keeps both services running until it is asked to end, then ends both, and leaves nothing behind."""

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeeper.cli import main
from kvkeeper.cli.show.readiness import until_serving
from kvkeeper.cli.start.up import memory_dir
from kvkeeper.client import AsyncCacheClient, AsyncEngineClient, CallOptions
from kvkeeper.common.service import VERSION
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.processes.service_pair import generate
from tests.support.processes.services import (
    Services,
    environment,
    free_ports,
    services_up,
    short_folder,
    sockets_in,
    up_command,
)

pytestmark = pytest.mark.in_turn

END_S = 30.0


def children(pid: int) -> dict[str, int]:
    """Process ids by service name."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        found[words[words.index("kvkeeper.cli") + 1]] = int(child)
    return found


def wait_for_end(*pids: int) -> None:
    """Until the processes, which need not be ours, are gone."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([descriptor], [], [], END_S)[0], f"process {pid} is still there"
        finally:
            os.close(descriptor)


def assert_nothing_left(folder: Path) -> None:
    """But the log, and the epoch that the next run goes on from."""
    assert {path.name for path in folder.rglob("*") if not path.is_dir()} <= {"log", "epoch"}


@pytest.fixture
def services(folder: Path) -> Iterator[Services]:
    with services_up(folder, *sockets_in(folder)) as running:
        yield running


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_both_and_leaves_nothing(
    services: Services, folder: Path, signum: signal.Signals, exit_code: int
) -> None:
    pids = children(services.process.pid)
    assert pids.keys() == {"cache", "engine"}
    services.process.send_signal(signum)
    assert services.process.wait(END_S) == exit_code
    wait_for_end(*pids.values())
    assert services.log_path.read_text().splitlines()[-1] == "kvkeeper: stopped; both services have ended"
    assert_nothing_left(folder)


@pytest.fixture(scope="module")
def lasting() -> Iterator[Services]:
    """For tests that leave it as it is."""
    with short_folder() as folder, services_up(folder, *sockets_in(folder)) as running:
        yield running


def told(services: Services) -> list[str]:
    """What `up` itself has said so far."""
    return [line for line in services.log_path.read_text().splitlines() if line.startswith("kvkeeper:")]


async def until_told(services: Services, text: str) -> None:
    async with asyncio.timeout(END_S):
        while not any(text in line for line in told(services)):
            assert services.process.poll() is None, services.log_path.read_text()
            await asyncio.sleep(0.02)  # another process writes it


def suffixes(folder: Path) -> set[str]:
    """Of the files in it; of none where there is no folder."""
    return {path.suffix for path in folder.glob("*")}


async def test_what_is_cached_outlives_the_cache_service_and_both_services() -> None:
    with short_folder() as folder:
        addresses = sockets_in(folder)
        memory = Path(memory_dir(addresses[0]))
        assert suffixes(memory) == set()
        prompt = "def fibonacci(n):  # the first n Fibonacci numbers, smallest first"
        try:
            with services_up(folder, *addresses, "--keep") as running:
                async with AsyncEngineClient(running.engine, CallOptions(timeout_s=END_S)) as client:
                    first = await generate(client, prompt, max_tokens=4)
                    async with AsyncCacheClient(running.cache) as cache:
                        assert (await cache.stats()).pools[0].num_indexed_blocks
                    os.kill(children(running.process.pid)["cache"], signal.SIGKILL)
                    await until_told(running, "the cache service serves again")
                    again = await generate(client, prompt, max_tokens=4)
            with services_up(folder, *addresses, "--keep") as running:
                async with AsyncEngineClient(running.engine, CallOptions(timeout_s=END_S)) as client:
                    last = await generate(client, prompt, max_tokens=4)
            assert first.texts == again.texts == last.texts
            assert first.usage.cached_tokens == 0 < again.usage.cached_tokens == last.usage.cached_tokens
            assert suffixes(memory) == {"", ".arena", ".index"}
        finally:
            shutil.rmtree(memory, ignore_errors=True)


async def test_a_service_that_dies_is_started_again_while_the_other_stays(services: Services, folder: Path) -> None:
    async with AsyncEngineClient(services.engine, CallOptions(timeout_s=END_S)) as client:
        first = await generate(client, "def", max_tokens=4)
        for dying, staying in (("engine", "cache"), ("cache", "engine")):
            before = children(services.process.pid)
            os.kill(before[dying], signal.SIGKILL)
            await until_told(services, f"the {dying} service serves again")
            await until_serving(services.engine)  # a new cache service is there before the engine has a session on it
            assert (await generate(client, "def", max_tokens=4)).token_ids == first.token_ids
            after = children(services.process.pid)
            assert after[staying] == before[staying]
            assert after[dying] != before[dying]
            again = f"kvkeeper: the {dying} service was ended by SIGKILL; starting it again in 0.25 s, the other stays"
            assert again in told(services)
    services.process.send_signal(signal.SIGINT)
    assert services.process.wait(END_S) == 130
    wait_for_end(*after.values())
    assert_nothing_left(folder)


def test_nothing_outlives_an_up_that_was_killed(services: Services) -> None:
    pids = children(services.process.pid)
    services.process.kill()
    services.process.wait(END_S)
    wait_for_end(*pids.values())


def run_up(folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """An `up` that ends by itself."""
    return subprocess.run(up_command(*flags), env=environment(folder), capture_output=True, text=True, timeout=END_S)


def test_a_service_that_cannot_start_ends_up_with_its_reason(folder: Path, tmp_path: Path) -> None:
    """That of what only the service itself finds out."""
    for file in DEMO_MODEL_DIR.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    cache, engine = sockets_in(folder)
    done = run_up(folder, "--cache-listen", cache, "--engine-listen", engine, "--model", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("kvkeeper")][-1].startswith(f"kvkeeper engine: --model {tmp_path}: ")
    (error,) = [json.loads(line)["error"] for line in lines if line.startswith('{"error"')]  # `up --json`
    message = "the engine service ended with exit code 1; ending the cache service"
    assert error == {"reason": "SERVICE_ENDED", "message": message, "metadata": {}}
    assert_nothing_left(folder)


@pytest.mark.parametrize(
    ("flags", "exit_code", "line"),
    [
        (["--model", "/nope"], 1, "kvkeeper: --model /nope: there is no such folder"),
        (["--cache-num-pools", "many"], 2, "kvkeeper: --cache-num-pools: a number, not 'many'"),
        (["--engine-lisen", "x"], 2, "kvkeeper: unknown flag --engine-lisen, did you mean --engine-listen?"),
        (["--cache-listen", "127.0.0.1:80000"], 2, "kvkeeper: --cache-listen: a port is at most 65535, not 80000"),
        (["--engine-metrics-listen", ":7543"], 2, "kvkeeper: --engine-metrics-listen: host:port such as 127.0.0.1:7412"),
        (["--pool-memory", "4000GiB"], 1, "kvkeeper: --cache-num-pools 2 of --pool-memory 4000 GiB each, lower one: 8000 GiB"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_starts(
    folder: Path, capfd: pytest.CaptureFixture[str], flags: list[str], exit_code: int, line: str
) -> None:
    cache, engine = sockets_in(folder)
    addresses = [] if "listen" in flags[0] else ["--cache-listen", cache, "--engine-listen", engine]
    assert main(["up", *addresses, *flags]) == exit_code
    out, said = capfd.readouterr()
    assert (out, said.count("\n")) == ("", 1)
    assert said.startswith(line)


@pytest.mark.parametrize(
    ("flags", "exit_code", "reason"),
    [(["--model", "/nope"], 1, "NOT_STARTED"), (["--engine-token-budget", "many"], 2, "USAGE")],
)
def test_with_json_what_is_wrong_is_one_object(
    folder: Path, capfd: pytest.CaptureFixture[str], flags: list[str], exit_code: int, reason: str
) -> None:
    cache, engine = sockets_in(folder)
    assert main(["up", "--json", "--cache-listen", cache, "--engine-listen", engine, *flags]) == exit_code
    out, said = capfd.readouterr()
    error = json.loads(said)["error"]
    assert (out, error["reason"], error["metadata"]) == ("", reason, {})
    assert error["message"].startswith(f"{flags[0]}: " if exit_code == 2 else f"{flags[0]} /nope: ")


def test_no_check_before_the_start_imports_torch(folder: Path) -> None:
    code = "import sys; from kvkeeper.cli import main; main(['up', '--model', '/nope']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(folder), capture_output=True, text=True, timeout=END_S)
    assert (done.stdout, done.stderr.count("\n")) == ("False\n", 1)


def test_an_address_that_is_taken_is_told_before_anything_starts(lasting: Services, capfd: pytest.CaptureFixture[str]) -> None:
    for flag, address in (("--cache-listen", lasting.cache), ("--engine-listen", lasting.engine)):
        other = "--engine-listen" if flag == "--cache-listen" else "--cache-listen"
        assert main(["up", flag, address, other, free_ports()[0]]) == 1
        said = capfd.readouterr().err
        assert said == f"kvkeeper: {flag} {address}: another service listens on {address.removeprefix('unix:')}\n"


def test_addresses_may_stand_in_a_file(lasting: Services, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kvkeeper.toml"
    file.write_text(f'[cache]\nlisten = "{free_ports()[0]}"\n[engine]\nlisten = "{lasting.engine}"\n')
    assert main(["up", "--config", str(file)]) == 1
    place, path = f"--engine-listen {lasting.engine}", lasting.engine.removeprefix("unix:")
    assert capfd.readouterr().err == f"kvkeeper: {place}: another service listens on {path}\n"
    file.write_text("[engine]\nthreads = 0\n")
    assert main(["up", "--config", str(file)]) == 2
    assert capfd.readouterr().err == f"kvkeeper: {file}: [engine] threads: 1 to 1024, not 0\n"


def test_the_log_says_which_service_speaks_and_what_the_start_does(lasting: Services) -> None:
    services = lasting
    lines = [json.loads(line) for line in services.log_path.read_text().splitlines() if line.startswith("{")]
    pids = children(services.process.pid)
    assert {(line["service"], line["pid"]) for line in lines} == {(name, pids[name]) for name in ("cache", "engine")}
    assert {line["version"] for line in lines} == {VERSION}
    doing = [line["doing"] for line in lines if line["event"] == "starting"]
    kernels = "loading the kernels for this CPU; the first start compiles them"
    assert doing == ["importing torch", "loading the model", kernels, "opening a session"]
    assert told(services)[:2] == ["kvkeeper: starting the cache service", "kvkeeper: starting the engine service"]
    (opened,) = [line for line in lines if line["event"] == "session_opened" and line["service"] == "cache"]
    for part in ("demo_model", services.engine, str(pids["engine"])):
        assert part in opened["client_name"]
