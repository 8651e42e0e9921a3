"""`kvkeeper up` ends both services whatever happens, and leaves nothing behind."""

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.services import Services, environment, free_ports, services_up, sockets_in, up_command

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
    assert sorted(path.name for path in folder.rglob("*") if path.name != "log" and not path.is_dir()) == []


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


def test_a_service_that_dies_takes_the_other_along_and_one_line_says_so(services: Services, folder: Path) -> None:
    pids = children(services.process.pid)
    os.kill(pids["engine"], signal.SIGKILL)
    assert services.process.wait(END_S) == 1
    wait_for_end(*pids.values())
    lines = [line for line in services.log_path.read_text().splitlines() if line.startswith("kvkeeper:")]
    assert lines == ["kvkeeper: the engine service was ended by SIGKILL; ending the cache service"]


def test_nothing_outlives_an_up_that_was_killed(services: Services) -> None:
    pids = children(services.process.pid)
    services.process.kill()
    services.process.wait(END_S)
    wait_for_end(*pids.values())


def run_up(folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """An `up` that ends by itself."""
    return subprocess.run(up_command(*flags), env=environment(folder), capture_output=True, text=True, timeout=END_S)


def test_a_service_that_cannot_start_ends_up_with_its_reason(folder: Path) -> None:
    cache, engine = sockets_in(folder)
    done = run_up(folder, "--cache-listen", cache, "--engine-listen", engine, "--model", str(folder / "none"))
    assert (done.returncode in (1, 2), done.stdout) == (True, "")
    assert "kvkeeper: the engine service ended with exit code" in done.stderr.splitlines()[-1]
    assert_nothing_left(folder)


def test_a_wrong_flag_of_a_service_is_wrong_usage(folder: Path) -> None:
    done = run_up(folder, "--cache-num-pools", "many", "--cache-listen", sockets_in(folder)[0])
    assert (done.returncode, done.stdout) == (2, "")
    assert "--num-pools" in done.stderr


def test_an_address_that_is_taken_is_told_before_anything_starts(services: Services, folder: Path) -> None:
    for flag, address in (("--cache-listen", services.cache), ("--engine-listen", services.engine)):
        other = "--engine-listen" if flag == "--cache-listen" else "--cache-listen"
        done = run_up(folder, flag, address, other, free_ports()[0])
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"kvkeeper: somebody serves at {address} already; choose another {flag}\n"
