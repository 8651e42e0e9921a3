"""The holder as a process: descriptors outlive who brought them, no other user comes in, and no client stops another."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeeper.common.hold import client as client_module
from kvkeeper.common.hold import holder as holder_module
from kvkeeper.common.hold.client import HolderAway
from kvkeeper.common.hold.messages import HoldRefused, Request, decode_answer, decode_request
from kvkeeper.common.service.listen import Peer
from tests.support.processes.holder_process import Running, holding
from tests.support.processes.services import environment, short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def memory(content: bytes) -> int:
    descriptor = os.memfd_create("held", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    return descriptor


def content_of(descriptor: int) -> bytes:
    content = os.pread(descriptor, 100, 0)
    os.close(descriptor)
    return content


def test_what_is_held_comes_back_to_another_connection_until_it_is_dropped(folder: Path) -> None:
    with holding(folder) as running:
        assert stat.S_IMODE(running.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(running.path.parent.stat().st_mode) == 0o700
        before = running.descriptors
        with running.connect() as first:
            for name, content in (("a", b"one"), ("b.2-x_Y", b"two")):
                first.put(name, len(content), descriptor := memory(content))
                os.close(descriptor)
        with running.connect() as second:
            assert second.held() == {"a": 3, "b.2-x_Y": 3}
            for _ in range(2):
                held = second.get("b.2-x_Y")
                assert (held.num_bytes, content_of(held.descriptor)) == (3, b"two")
            second.drop("a")
            assert second.held() == {"b.2-x_Y": 3}
            for call in (second.get, second.drop):
                with pytest.raises(HoldRefused, match=r"^UNKNOWN_NAME$"):
                    call("a")
            second.drop("b.2-x_Y")
            assert running.descriptors == before + 1, "the connection; nothing else is left open"
        assert running.end() == 0
        assert not running.path.exists() and not running.path.with_name("sock.lock").exists()


def test_the_bounds_refuse_and_lose_nothing(folder: Path) -> None:
    with holding(folder, "--max-held", "2") as running, running.connect() as client:
        one, two = memory(b"one"), memory(b"two")
        client.put("a", 3, one)
        before = running.descriptors
        for name, num_bytes, reason in (
            ("a", 3, "NAME_TAKEN"), ("x" * 65, 3, "BAD_REQUEST"), ("", 3, "BAD_REQUEST"), ("a/b", 3, "BAD_REQUEST"),
            ("c", 0, "BAD_REQUEST"), ("c", 1 << 62, "BAD_REQUEST"), ("c\n", 3, "BAD_REQUEST"),
        ):  # fmt: skip
            with pytest.raises(HoldRefused, match=rf"^{reason}$"):
                client.put(name, num_bytes, two)
        client.put("x" * 64, 3, two)
        with pytest.raises(HoldRefused, match=r"^FULL$"):
            client.put("c", 3, two)
        assert client.held() == {"a": 3, "x" * 64: 3}
        assert running.descriptors == before + 1
        assert content_of(client.get("a").descriptor) == b"one"
        for descriptor in (one, two):
            os.close(descriptor)


@pytest.mark.parametrize(
    "packet",
    [
        b"{", b"[]", b"null", b"\xff", b"{}", b'{"call": "list", "name": "a"}', b'{"call": "stop"}', b'{"call": ["list"]}',
        b'{"call": "get"}', b'{"call": "get", "name": 1}', b'{"call": "get", "name": "a", "num_bytes": 1}',
        b'{"call": "put", "name": "a", "num_bytes": true}', b'{"call": "put", "name": "a", "num_bytes": 1.5}',
        b'{"call": "put", "name": "a"}', b'{"call": "put", "name": "a", "num_bytes": 1, "mode": 7}',
        b'{"call": "put", "name": "a", "num_bytes": 3}' + b" " * 600, b"[" * 500,
    ],
)  # fmt: skip
def test_nonsense_is_refused(packet: bytes) -> None:
    with pytest.raises(HoldRefused, match=r"^BAD_REQUEST$"):
        decode_request(packet)


def test_requests_cross_the_socket() -> None:
    for request in (Request("list"), Request("get", "a"), Request("drop", "a"), Request("put", "a", 7)):
        assert decode_request(request.encode()) == request
    for answer in (b"[]", b"{", b'{"error": "no name of capitals"}', b'{"error": 3}'):
        with pytest.raises(HoldRefused, match=r"^BAD_ANSWER$"):
            decode_answer(answer)


def raw(running: Running) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.fspath(running.path))
    connection.settimeout(30)
    return connection


def test_descriptors_beside_a_packet_that_has_no_place_for_them_are_closed(folder: Path) -> None:
    with holding(folder) as running, raw(running) as connection:
        connection.send(b'{"call": "list"}')
        assert connection.recv(100) == b'{"held": {}}'
        before = running.descriptors
        one = memory(b"one")
        for packet, count in ((b'{"call": "list"}', 1), (Request("put", "a", 3).encode(), 0)):
            socket.send_fds(connection, [packet], [one] * count)
            assert connection.recv(100) == b'{"error": "BAD_REQUEST"}'
        for count in (2, 4, 9):  # the last is more than are taken from a packet
            socket.send_fds(connection, [Request("put", "a", 3).encode()], [one] * count)
            assert connection.recv(100) == b'{"error": "BAD_REQUEST"}'
        assert running.descriptors == before
        os.close(one)


def test_clients_that_say_nothing_or_do_not_read_stop_nobody(folder: Path) -> None:
    with holding(folder) as running, contextlib.ExitStack() as open_ones:
        idle = [open_ones.enter_context(raw(running)) for _ in range(40)]
        with running.connect() as client:
            client.put("a", 3, one := memory(b"one"))
            os.close(one)
            deaf = open_ones.enter_context(raw(running))
            deaf.settimeout(10)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while True:  # until it is cut off
                    deaf.send(b'{"call": "list"}')
            assert client.held() == {"a": 3}
        assert idle[0].recv(100) == b"", "the oldest made room"


def connect_for_ever(running: Running, waiting: contextlib.ExitStack) -> None:
    """Until no more can wait to be accepted."""
    while True:
        waiting.enter_context(running.connect())


def test_a_holder_that_stands_still_is_away_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_TIMEOUT", 1.0)
    with holding(folder) as running:
        running.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, running.process.pid, os.WSTOPPED)
        with pytest.raises(HolderAway, match=r"^the holder is gone: it does not answer$"):
            with running.connect() as client:
                client.held()
        with contextlib.ExitStack() as waiting, pytest.raises(HolderAway, match=r"^no holder can be reached: Resource temp"):
            connect_for_ever(running, waiting)
        running.process.send_signal(signal.SIGCONT)
        with running.connect() as client:
            assert client.held() == {}


def test_a_second_holder_at_an_address_and_a_wrong_address_are_told(folder: Path) -> None:
    with holding(folder) as running:
        for flags, code, said in (
            ((running.address,), 1, "another service listens on"),
            (("unix:/proc/no/sock",), 1, "No such file"),
            (("127.0.0.1:1",), 2, "--listen: unix:/path, not '127.0.0.1:1'"),
            ((f"unix:{folder}/s", "--max-held", "0"), 2, "--max-held: 1 to 256"),
        ):
            command = [sys.executable, "-m", "kvkeeper.common.hold", "--listen", *flags]
            ended = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=60)
            assert (ended.returncode, ended.stdout) == (code, "")
            assert said in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_the_next_holder_starts_where_one_was_killed(folder: Path) -> None:
    with holding(folder) as first:
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        with pytest.raises(HolderAway, match="Connection refused"):
            first.connect()
        with holding(folder) as second, second.connect() as client:
            assert client.held() == {}


def test_another_users_process_is_refused_on_both_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernel named another user; a test cannot be two."""
    with holding(folder) as running:
        monkeypatch.setattr(client_module, "get_peer", lambda _: Peer(1, os.geteuid() + 1))
        with pytest.raises(HolderAway, match="belongs to another user"):
            running.connect()
    monkeypatch.setattr(holder_module, "get_peer", lambda _: Peer(1, os.geteuid() + 1))
    holder = holder_module.Holder(folder / "s", 4, holder_module.SystemdStore({}))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.fspath(folder / "s"))
        connection.settimeout(10)
        holder._accept()
        assert connection.recv(100) == b'{"error": "FOREIGN_USER"}'
        assert connection.recv(100) == b""
    holder.stop()
    holder.serve()


def test_it_is_small(folder: Path) -> None:
    script = (
        "import sys, kvkeeper.cli.commands, kvkeeper.common.hold.__main__, kvkeeper.common.hold.client;"
        "print([name for name in sys.modules if name.partition('.')[0] in ('grpc', 'google', 'numpy', 'torch', 'cuda')])"
    )
    found = subprocess.run([sys.executable, "-c", script], env=environment(folder), capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr


def test_the_command_asks_the_holder_that_runs(folder: Path) -> None:
    def ask(*flags: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "kvkeeper.cli", "hold", "--listen", f"unix:{folder}/hold/sock", *flags]
        ended = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=60)
        return ended.returncode, ended.stdout, ended.stderr

    away = f"kvkeeper hold: --listen unix:{folder}/hold/sock: no holder can be reached: No such file or directory\n"
    assert ask("--show") == (1, "", away)
    with holding(folder) as running, running.connect() as client:
        one = memory(b"one")
        for name in ("a", "b"):
            client.put(name, 3, one)
        os.close(one)
        assert ask("--show") == (0, "a\t3\nb\t3\n", "")
        assert ask("--drop", "a", "--show") == (0, "b\t3\n", "")
        code, _, said = ask("--drop", "a")
        assert code == 1 and said.endswith(": UNKNOWN_NAME\n")
        assert ask("--drop", "a/b")[0] == 2
