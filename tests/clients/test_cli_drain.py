"""`kvkeeper drain` finds the process behind an address, asks it once, waits for its end; `status --only` asks one service."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvkeeper.cli import main
from tests.support.processes.services import free_ports, short_folder

# Listens, says so, and then does what its last argument names once it is asked to stop.
LISTENER = """
import os, signal, socket, sys
address, does = sys.argv[1:]
listener = socket.socket(socket.AF_UNIX if address.startswith("unix:") else socket.AF_INET)
host, _, port = address.rpartition(":")
listener.bind(address[5:] if address.startswith("unix:") else (host, int(port)))
listener.listen()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7) if does == "ends" else os.write(1, b"asked\\n"))
print("listens", flush=True)
while True:
    signal.pause()
"""


@contextmanager
def listening(address: str, does: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-c", LISTENER, address, does], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "listens\n"
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with short_folder() as folder:
        yield f"unix:{folder}/s" if request.param == "unix" else free_ports()[0]


def test_it_asks_the_process_at_the_address_and_waits_for_its_end(address: str) -> None:
    with listening(address, "ends") as process:
        assert main(["drain", address, "--timeout", "20"]) == 0
        assert process.wait(0) == 7, "it has ended by its own rule"


def test_an_engine_whose_front_listens_is_asked_itself(address: str) -> None:
    engine = f"""
import signal, subprocess, sys
fronts = []
def end(*_):
    fronts[0].kill()
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
listener = {LISTENER!r}.replace("does = sys.argv[1:]", "does = sys.argv[1:3]")
fronts.append(subprocess.Popen([sys.executable, "-c", listener, *sys.argv[1:]]))
while True:
    signal.pause()
"""
    command = [sys.executable, "-c", engine, address, "goes on", "kvkeeper.engine_service.serving.front_main"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        assert main(["drain", address, "--timeout", "20"]) == 0
        assert process.wait(20) == 7


def test_a_process_that_does_not_end_is_told(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with listening(address, "goes on") as process:
        assert main(["drain", address, "--timeout", "0.1"]) == 1
        assert capsys.readouterr().err == "kvkeeper: it has not ended within 0.1 s\n"
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"


def test_one_that_only_waits_does_not_ask(address: str) -> None:
    with listening(address, "goes on") as process:
        assert main(["drain", address, "--only-wait", "--timeout", "0.1"]) == 1
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == "", "it was not asked"


def test_nothing_there_and_a_wrong_address_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free, _ = free_ports()
    for missing in (free, f"unix:{tmp_path}/none"):
        assert main(["drain", missing]) == 3
        assert capsys.readouterr().err == f"kvkeeper: nothing listens at {missing}\n"
    with socket.create_server(("127.0.0.1", 0)) as bound:  # this process, which is not asked
        assert main(["drain", f"127.0.0.1:{bound.getsockname()[1]}", "--only-wait", "--timeout", "0"]) == 1
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["drain", "engine"])
    assert ended.value.code == 2
    assert "host:port or unix:/path, not 'engine'" in capsys.readouterr().err


def test_status_asks_one_service_alone(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = free_ports()
    assert main(["status", "--only", "engine", "--cache", first, "--engine", second]) == 3
    said = capsys.readouterr()
    assert second in said.out
    assert first not in said.out + said.err
