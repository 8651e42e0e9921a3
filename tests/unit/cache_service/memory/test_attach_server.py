"""The attach socket by itself: the clients that get the memory, and the ends of process and mapping."""

import array
import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvkeeper.cache_service.memory import attach_server as attach
from kvkeeper.cache_service.memory.attach_server import AttachRefused, AttachServer, Grant, Part
from kvkeeper.cache_service.memory.shared_memory import SharedMemoryArena

DEADLINE = 10.0


class Desk:
    """Accepts one token and records the callbacks."""

    def __init__(self, arena: SharedMemoryArena) -> None:
        self.arena = arena
        self.token = "token"
        self.process_ended = asyncio.Event()
        self.unmapped = asyncio.Event()
        self.session_over = asyncio.Event()
        self.parts: list[frozenset[Part]] = []
        self.given_away: socket.socket | None = None

    def redeem(self, token: str, parts: frozenset[Part], rank: int) -> Grant:
        self.parts.append(parts)
        if token != self.token:
            raise AttachRefused("UNKNOWN_TOKEN")
        descriptors = self.arena.descriptors()
        if self.given_away is not None:
            descriptors = [self.given_away.fileno()]
        ends = self.process_ended.set, self.unmapped.set, self.session_over
        return Grant(self.arena.fields(), descriptors, *ends, self.given_away)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


@pytest.fixture
def arena() -> Iterator[SharedMemoryArena]:
    made = SharedMemoryArena(8192)
    yield made
    made.close()


@pytest.fixture
async def desk(arena: SharedMemoryArena) -> Desk:
    return Desk(arena)


@pytest.fixture
async def server(folder: Path, desk: Desk) -> AsyncIterator[AttachServer]:
    served = AttachServer(folder / "a", desk, asyncio.get_running_loop())
    yield served
    await served.close()
    assert os.listdir(folder) == []


async def connect(server: AttachServer) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, str(server.path))
    return connection


async def answer(connection: socket.socket, sent: bytes) -> dict[str, object]:
    """What the service says to these bytes; the descriptor, if there is one, as `descriptor`."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, sent)
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    await asyncio.wait_for(readable.wait(), DEADLINE)
    loop.remove_reader(connection)
    line, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(4))
    said = json.loads(line)
    if ancillary:
        descriptors = array.array("i")
        descriptors.frombytes(ancillary[0][2])
        said["descriptor"] = descriptors[0]
    return said


async def test_a_token_is_answered_with_the_memory(server: AttachServer, desk: Desk) -> None:
    connection = await connect(server)
    said = await answer(connection, b"token\n")
    descriptor = said.pop("descriptor")
    assert said == {"kind": "memfd", "num_bytes": 8192}
    assert isinstance(descriptor, int)
    assert os.path.samestat(os.fstat(descriptor), os.fstat(desk.arena.descriptor))
    os.close(descriptor)
    assert not desk.unmapped.is_set()
    connection.close()
    await asyncio.wait_for(desk.unmapped.wait(), DEADLINE)
    assert not desk.process_ended.is_set()  # this very process


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b"token\n", {Part.MEMORY}),
        (b"token memory\n", {Part.MEMORY}),
        (b"token step-lane\n", {Part.STEP_LANE}),
        (b"token memory step-lane\n", {Part.MEMORY, Part.STEP_LANE}),
    ],
)
async def test_the_line_names_the_parts(server: AttachServer, desk: Desk, line: bytes, parts: set[Part]) -> None:
    connection = await connect(server)
    os.close((await answer(connection, line))["descriptor"])  # type: ignore[arg-type]
    connection.close()
    assert desk.parts == [parts]


@pytest.mark.parametrize("line", [b"token lane\n", b"token memory \n", b"token  memory\n", b"token MEMORY\n"])
async def test_an_unknown_part_is_refused_and_the_token_stays_good(server: AttachServer, desk: Desk, line: bytes) -> None:
    connection = await connect(server)
    assert await answer(connection, line) == {"error": "UNKNOWN_PART"}
    connection.close()
    assert desk.parts == []


async def test_a_socket_that_is_given_away_is_closed_here(server: AttachServer, desk: Desk) -> None:
    ours, desk.given_away = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = await connect(server)
    theirs = socket.socket(fileno=(await answer(connection, b"token step-lane\n"))["descriptor"])  # type: ignore[arg-type]
    assert desk.given_away.fileno() == -1
    theirs.close()
    assert ours.recv(1) == b""  # no other process holds it
    ours.close()
    connection.close()


async def test_bytes_after_the_token_are_ignored(server: AttachServer, desk: Desk) -> None:
    connection = await connect(server)
    os.close((await answer(connection, b"token\n"))["descriptor"])  # type: ignore[arg-type]
    await asyncio.get_running_loop().sock_sendall(connection, bytes(10_000))
    assert not desk.unmapped.is_set()
    connection.shutdown(socket.SHUT_WR)
    await asyncio.wait_for(desk.unmapped.wait(), DEADLINE)
    connection.close()


@pytest.mark.parametrize("sent", [b"other\n", b"\n", b"x" * 200, b"\xff\xfe\n", b"token\nmore"])
async def test_a_line_without_a_valid_token_is_refused(server: AttachServer, sent: bytes) -> None:
    connection = await connect(server)
    assert await answer(connection, sent) == {"error": "UNKNOWN_TOKEN"}
    with contextlib.suppress(ConnectionResetError):  # where bytes were left unread
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    connection.close()


async def test_a_silent_client_is_disconnected(server: AttachServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "_HANDSHAKE_TIMEOUT", 0.0)
    connection = await connect(server)
    assert await answer(connection, b"tok") == {"error": "TOO_SLOW"}
    connection.close()


async def test_handshakes_are_bounded(server: AttachServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "_MAX_HANDSHAKES", 1)
    first, second = await connect(server), await connect(server)
    assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(second, 1), DEADLINE) == b""
    os.close((await answer(first, b"token\n"))["descriptor"])  # type: ignore[arg-type]
    first.close()
    second.close()


async def test_another_user_is_refused(server: AttachServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach.os, "geteuid", lambda: os.getuid() + 1)
    connection = await connect(server)
    assert await answer(connection, b"token\n") == {"error": "FOREIGN_USER"}
    connection.close()


async def test_the_end_of_a_session_ends_the_watch_of_its_process(server: AttachServer, desk: Desk) -> None:
    connection = await connect(server)
    os.close((await answer(connection, b"token\n"))["descriptor"])  # type: ignore[arg-type]
    connection.close()
    await asyncio.wait_for(desk.unmapped.wait(), DEADLINE)
    (serving,) = server._connections
    desk.session_over.set()
    await asyncio.wait_for(serving, DEADLINE)


async def test_the_socket_is_for_its_owner_only(server: AttachServer) -> None:
    assert server.path.stat().st_mode & 0o777 == 0o600
