"""Connections to a Valkey or Redis server for values as large as blocks, sent from and received into the arena itself.

A client library makes bytes of each value first and copies them several times on either way, which costs more than the network.
Only what is needed is spoken: commands in one batch, and the answers, in order (RESP 2). Rules: a connection on which anything
unexpected came is closed, because what follows on it could be taken for another answer, and so are those that wait for their
next use, because the server may be another one; no answer is believed to be much longer than what was asked for. Times out as
its sockets do. May be used by any thread, one at a time for each.
"""

import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from .remote_address import Node, RemoteAddress, RemoteSecret

_MOST_LINE, _MOST_SMALL = 4096, 1 << 16  # bytes of a line, and of an answer that nothing waits for
_TOGETHER = 64  # buffers of one call of the system

Part = bytes | tuple[bytes, memoryview]  # a value that is a header and a block
Answer = bytes | int | None


class Refusal(NamedTuple):
    """The server answered a command with an error."""

    text: str


class Received(NamedTuple):
    """A value lies in the buffers that waited for it."""


class BulkConnection:
    """One connection, on a socket that is connected and known to the server."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._reader = link.makefile("rb")

    def exchange(
        self, commands: Sequence[Sequence[Part]], into: Sequence[Sequence[memoryview]] = ()
    ) -> list[Answer | Refusal | Received]:
        """Runs the commands, and returns the answers, in order.

        into: buffers for the values of the last commands; a value counts as received if it is as long as all of its buffers
        together, and is returned as it is if it has another length. Raises OSError, ValueError.
        """
        self.send(commands)
        return self.receive(len(commands) - len(into), into)

    def send(self, commands: Sequence[Sequence[Part]]) -> None:
        """The first half of an exchange. Raises OSError."""
        self._send([buffer for command in commands for buffer in _encoded(command)])

    def receive(self, num_plain: int, into: Sequence[Sequence[memoryview]]) -> list[Answer | Refusal | Received]:
        """The second half: answers to num_plain commands, then to those with buffers. Raises OSError, ValueError."""
        replies: list[Answer | Refusal | Received] = [self._answer(()) for _ in range(num_plain)]
        return replies + [self._answer(buffers) for buffers in into]

    def close(self) -> None:
        self._reader.close()
        self._link.close()

    def _send(self, views: list[memoryview]) -> None:
        if isinstance(self._link, ssl.SSLSocket):
            for view in views:
                self._link.sendall(view)
            return
        at = 0
        while at < len(views):
            num_sent = self._link.sendmsg(views[at : at + _TOGETHER])
            while at < len(views) and num_sent >= len(views[at]):
                num_sent -= len(views[at])
                at += 1
            if num_sent:
                views[at] = views[at][num_sent:]

    def _answer(self, buffers: Sequence[memoryview]) -> Answer | Refusal | Received:
        line = self._reader.readline(_MOST_LINE)
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server ended the connection")
        kind, text = line[:1], line[1:-2]
        if kind == b"+":
            return text
        if kind == b"-":
            return Refusal(text.decode(errors="replace"))
        number = int(text)
        if kind == b":":
            return number
        if kind != b"$":
            raise ValueError("not an answer that was asked for")
        return None if number == -1 else self._value(number, buffers)

    def _value(self, size: int, buffers: Sequence[memoryview]) -> bytes | Received:
        num_awaited = sum(len(buffer) for buffer in buffers)
        if not 0 <= size <= max(2 * num_awaited, _MOST_SMALL):
            raise ValueError("a longer answer than was asked for")
        is_awaited = bool(buffers) and size == num_awaited
        other = bytearray(0 if is_awaited else size)
        for buffer in buffers if is_awaited else (memoryview(other),):
            self._fill(buffer)
        if self._reader.read(2) != b"\r\n":
            raise ValueError("not the end of an answer")
        return Received() if is_awaited else bytes(other)

    def _fill(self, buffer: memoryview) -> None:
        while len(buffer):
            num_read = self._reader.readinto(buffer)
            if not num_read:
                raise ConnectionError("the server ended the connection")
            buffer = buffer[num_read:]


class BulkConnections:
    """Connections to one server, made when they are needed and kept for the next."""

    def __init__(self, node: Node, address: RemoteAddress, secret: RemoteSecret, timeout: float) -> None:
        """node: of the address, or one that a cluster has named. timeout: seconds of one call of the system."""
        self._node, self._address, self._secret, self._timeout = node, address, secret, timeout
        self._idle: list[BulkConnection] = []
        self._lock = threading.Lock()
        self._tls = ssl.create_default_context(cafile=address.ca and str(address.ca)) if address.is_tls else None

    @contextmanager
    def one(self) -> Iterator[BulkConnection]:
        """A connection of this thread's own. It is kept if nothing was raised. Raises OSError, ValueError."""
        connection = self.borrow()
        try:
            yield connection
        except BaseException:
            self.drop(connection)
            raise
        self.give_back(connection)

    def borrow(self) -> BulkConnection:
        """A connection of this thread's own, until it is given back or dropped. Raises OSError, ValueError."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            return connection
        try:
            return self._connect()
        except BaseException:
            self.close()
            raise

    def give_back(self, connection: BulkConnection) -> None:
        """All answers were read, and nothing unexpected came."""
        with self._lock:
            self._idle.append(connection)

    def drop(self, connection: BulkConnection) -> None:
        """Anything else came, or nothing."""
        connection.close()
        self.close()

    def close(self) -> None:
        """Those that are not in use."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _connect(self) -> BulkConnection:
        link = socket.create_connection(self._node, self._timeout)
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                link = self._tls.wrap_socket(link, server_hostname=self._node.host)
            connection = BulkConnection(link)
            commands = []
            if self._secret.password is not None:
                user = [self._secret.user.encode()] if self._secret.user is not None else []
                commands.append([b"AUTH", *user, self._secret.password.encode()])
            commands.append([b"SELECT", str(self._address.db).encode()])
            if any(answer != b"OK" for answer in connection.exchange(commands)):
                raise ConnectionRefusedError("the server does not know us, or not the database")
            return connection
        except BaseException:
            link.close()
            raise


def _encoded(command: Sequence[Part]) -> list[memoryview]:
    """An array of bulk strings. Blocks stay where they are."""
    buffers: list[memoryview] = []
    small = b"*%d\r\n" % len(command)
    for part in command:
        if isinstance(part, bytes):
            small += b"$%d\r\n%b\r\n" % (len(part), part)
            continue
        header, block = part
        buffers += [memoryview(small + b"$%d\r\n%b" % (len(header) + len(block), header)), block]
        small = b"\r\n"
    return [*buffers, memoryview(small)]
