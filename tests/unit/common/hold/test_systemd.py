"""systemd's store: what the holder tells it, and what the next holder gets from it. The socket here is the manager's."""

import configparser
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeeper.common.hold.client import HolderClient
from kvkeeper.common.hold.config import SOURCE
from kvkeeper.common.hold.systemd import SystemdStore
from tests.support.processes.services import environment, short_folder


@pytest.fixture
def manager() -> Iterator[tuple[socket.socket, Path]]:
    """A socket for notifications, and the folder that it is in."""
    with short_folder() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(os.fspath(folder / "notify"))
        receiver.settimeout(30)
        yield receiver, folder


def told(receiver: socket.socket) -> tuple[str, list[int]]:
    text, descriptors, _, _ = socket.recv_fds(receiver, 1000, 4)
    return text.decode(), descriptors


# Hands descriptor 0 in as the third, as the manager does, and becomes the holder.
_UNIT = """
import os, sys
names = sys.argv[1]
for number in range(names.count(":") + 1 if names else 0):
    os.dup2(0, 3 + number)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(names.count(":") + 1 if names else 0), "LISTEN_FDNAMES": names}
os.execv(sys.executable, [sys.executable, "-m", "kvkeeper.common.hold", "--listen", sys.argv[2]])
"""


@contextlib.contextmanager
def unit(folder: Path, names: str, stored: int) -> Iterator["subprocess.Popen[bytes]"]:
    """The holder, until it has ended; killed with the block."""
    environ = environment(folder) | {"NOTIFY_SOCKET": str(folder / "notify")}
    command = [sys.executable, "-c", _UNIT, names, f"unix:{folder}/s"]
    process = subprocess.Popen(command, env=environ, stdin=stored, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_holder_that_is_killed_gets_back_what_the_manager_stored(manager: tuple[socket.socket, Path]) -> None:
    receiver, folder = manager
    memory = os.memfd_create("held")
    os.write(memory, b"bytes")
    with open(os.devnull) as nothing, unit(folder, "", nothing.fileno()):
        assert told(receiver) == ("READY=1", [])
        with HolderClient(f"unix:{folder}/s") as client:
            client.put("a", 5, memory)
            client.put("b", 7, memory)
            text, (stored,) = told(receiver)
            assert text == "FDSTORE=1\nFDNAME=a+5\nFDPOLL=0"
            os.close(told(receiver)[1][0])
            client.drop("b")
            assert told(receiver) == ("FDSTOREREMOVE=1\nFDNAME=b+7", [])
    os.close(memory)
    with unit(folder, "a+5:other:a+5:x+0", stored) as process:
        os.close(stored)
        assert told(receiver) == ("READY=1", [])
        with HolderClient(f"unix:{folder}/s") as client:
            assert client.held() == {"a": 5}, "what is not ours, or doubled, was closed"
            descriptor, _ = client.get("a")
            assert os.pread(descriptor, 10, 0) == b"bytes"
            os.close(descriptor)
        stdin, held = (os.path.realpath(f"/proc/{process.pid}/fd/{number}") for number in (0, 3))
        others = [number for number in (4, 5, 6) if os.path.realpath(f"/proc/{process.pid}/fd/{number}") == held]
        assert stdin == held and not others, "the third; the first is this test's way to hand it in"
        process.terminate()
        assert process.wait(30) == 0
        assert told(receiver) == ("STOPPING=1", [])


def test_variables_of_another_process_are_taken_out_and_not_heeded(manager: tuple[socket.socket, Path]) -> None:
    _, folder = manager
    environ = {"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a+1:b+1", "OTHER": "1"}
    assert SystemdStore(environ).take() == {}
    assert environ == {"OTHER": "1"}
    store = SystemdStore({"NOTIFY_SOCKET": f"{folder}/nothing-there"})
    store.notify_ready()  # no process listens: the holder goes on


def test_the_managers_socket_may_have_an_abstract_name() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0kvkeeper-test-{os.getpid()}")
        receiver.settimeout(30)
        SystemdStore({"NOTIFY_SOCKET": f"@kvkeeper-test-{os.getpid()}"}).notify_ready()
        assert receiver.recv(100) == b"READY=1"


def test_the_unit_starts_a_holder_whose_descriptors_all_have_a_place() -> None:
    folder = Path(__file__).parents[4] / "deploy" / "systemd"
    unit = configparser.ConfigParser(interpolation=None, strict=False)  # systemd takes an option more than once
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((folder / "kvkeeper-hold.service").read_text())
    service = unit["Service"]
    _, command, *flags = service["ExecStart"].split()
    assert (command, flags, service["Type"]) == ("hold", ["--config", "/etc/kvkeeper.toml"], "notify")
    config = SOURCE.load(["--config", str(folder / "kvkeeper.toml")], {})
    assert int(service["FileDescriptorStoreMax"]) >= config.max_held
    cache = (folder / "kvkeeper-cache.service").read_text()
    assert f"User={service['User']}\n" in cache and config.listen.startswith("unix:/run/kvkeeper/")
