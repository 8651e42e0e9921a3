"""The attach socket: hands an arena to the process at the other end, and notices when that process or its mapping ends.

Owns the listening socket and one connection per attached process. The kernel names the process that connects (SO_PEERCRED) and
reports when it dies (pidfd); gRPC in Python can do neither. The client sends a token that is good once for each rank, perhaps
the names of the parts that it wants and its rank, and a newline. The answer is one JSON line with the descriptors of the parts:
of the rank's arena, of the host tier's arena where there is one, and of the step lane; an arena in CUDA memory has a handle in
the line instead of a descriptor. The client keeps the connection open for as long as it maps the arenas. So the end of the
connection is the end of the mapping (forked children inherit both), and the pidfd is the end of a process without which the
session cannot go on; a killed process shows both. Knows tokens, parts, ranks and descriptors, no sessions.
"""

import array
import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from kvkeeper.common.service.listen import SocketLock, get_peer, listen_privately

from .timeouts import Clock, within

_HANDSHAKE_TIMEOUT = 5.0  # seconds
_MAX_TOKEN_BYTES = 128
_RANK, _MAX_RANK_DIGITS = "rank:", 4
_MAX_HANDSHAKES = 64  # connections that have not shown a token yet


class Part(StrEnum):
    """A part of a session that a process can ask for; a line with a token alone asks for the memory."""

    MEMORY = "memory"
    STEP_LANE = "step-lane"


class AttachRefused(Exception):
    """The text is the refusal's reason, a name of capital letters."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights behind a token: descriptors, and callbacks for the ends of process and mapping. Each runs at most once."""

    fields: dict[str, object]  # the line that describes the parts
    descriptors: list[int]
    on_process_end: Callable[[], None]
    on_unmapped: Callable[[], None]
    session_over: asyncio.Event  # set by the desk: the process need not be watched any more
    given_away: socket.socket | None = None  # closed here once the process has it; its descriptor is the last one


class AttachDesk(Protocol):
    """Decides about tokens."""

    def redeem(self, token: str, parts: frozenset[Part], rank: int) -> Grant:
        """Spends the token for this rank, whose process counts as attached from now on, if memory is among the parts.

        Raises AttachRefused.
        """


class AttachServer:
    """Serves the attach socket at path on the running loop. Raises AddressInUse."""

    def __init__(self, path: Path, desk: AttachDesk, clock: Clock) -> None:
        """clock times the handshakes, so that none counts as slow because this service is slow."""
        self.path = path
        self._clock = clock
        self._lock = SocketLock(path)
        self._desk = desk
        self._connections: set[asyncio.Task[None]] = set()
        self._num_handshakes = 0
        self._listener = listen_privately(self.path, socket.SOCK_STREAM, _MAX_HANDSHAKES)
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Ends every connection and removes the socket, without calling the callbacks of the grants."""
        tasks = [self._accepting, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        self._lock.release()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # out of descriptors: wait until open connections end
                await asyncio.sleep(0.1)
                continue
            if self._num_handshakes >= _MAX_HANDSHAKES:
                connection.close()
                continue
            connection.setblocking(False)
            self._num_handshakes += 1
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with contextlib.closing(connection), contextlib.suppress(ConnectionError):
            try:
                try:
                    async with within(self._clock, _HANDSHAKE_TIMEOUT):
                        token, parts, rank = await _read_request(connection)
                finally:
                    self._num_handshakes -= 1
                process = _open_process(connection)
            except (AttachRefused, TimeoutError) as error:
                await _refuse(connection, str(error) or "TOO_SLOW")
                return
            try:
                try:
                    grant = self._desk.redeem(token, parts, rank)
                except AttachRefused as error:
                    await _refuse(connection, str(error))
                    return
                await _watch(connection, process, grant)
            finally:
                os.close(process)


async def _watch(connection: socket.socket, process: int, grant: Grant) -> None:
    """Hands the parts over, and stays until the mapping is gone and the process or the session too."""
    loop = asyncio.get_running_loop()
    over = grant.session_over

    def end_process() -> None:
        loop.remove_reader(process)
        grant.on_process_end()
        over.set()

    loop.add_reader(process, end_process)
    try:
        with contextlib.suppress(ConnectionError):
            _hand_over(connection, grant)
            while await loop.sock_recv(connection, 4096):
                pass  # the client has nothing more to say; bytes that come anyway are ignored
        grant.on_unmapped()
        connection.close()
        await over.wait()
    finally:
        loop.remove_reader(process)


def _hand_over(connection: socket.socket, grant: Grant) -> None:
    """One sendmsg on a fresh socket never blocks: its buffer is empty and larger than the line."""
    answer = json.dumps(grant.fields).encode() + b"\n"
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", grant.descriptors))] if grant.descriptors else []
    try:
        connection.sendmsg([answer], ancillary)
    finally:
        if grant.given_away is not None:
            grant.given_away.close()


async def _read_request(connection: socket.socket) -> tuple[str, frozenset[Part], int]:
    """The token, the wanted parts and the rank, 0 where none is named. Raises AttachRefused."""
    loop = asyncio.get_running_loop()
    line = b""
    while b"\n" not in line:
        piece = await loop.sock_recv(connection, _MAX_TOKEN_BYTES)
        line += piece
        if not piece or len(line) > _MAX_TOKEN_BYTES:
            raise AttachRefused("UNKNOWN_TOKEN")
    token, *names = line.removesuffix(b"\n").decode("ascii", "replace").split(" ")
    rank = 0
    if names and names[-1].startswith(_RANK):
        text = names.pop().removeprefix(_RANK)
        if not (text.isascii() and text.isdigit() and len(text) <= _MAX_RANK_DIGITS):
            raise AttachRefused("UNKNOWN_RANK")
        rank = int(text)
    try:
        return token, frozenset(map(Part, names or [Part.MEMORY])), rank
    except ValueError:
        raise AttachRefused("UNKNOWN_PART") from None


def _open_process(connection: socket.socket) -> int:
    """A pidfd of the process at the other end, which must run as the same user."""
    peer = get_peer(connection)
    if peer.user != os.geteuid():
        raise AttachRefused("FOREIGN_USER")
    try:
        return os.pidfd_open(peer.process)
    except OSError:  # the process has ended, or lives in another PID namespace
        raise AttachRefused("UNKNOWN_PROCESS") from None


async def _refuse(connection: socket.socket, reason: str) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, json.dumps({"error": reason}).encode() + b"\n")
