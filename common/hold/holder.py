"""Holder: the descriptors that are held, and the socket on which they come and go.

Rules: the socket is open to this user alone, by its mode and by the kernel's word on who connects; a name has one descriptor,
and is free again once it is dropped; the number of descriptors and of connections is bounded; nothing waits for a client: a
packet is complete when it can be read, and a client that does not read its answers is cut off. Knows nothing of what a
descriptor is of.
"""

import contextlib
import json
import os
import selectors
import socket
from pathlib import Path

import structlog

from kvkeeper.common.hold.messages import MAX_REQUEST_BYTES, HoldRefused, Request, decode_request
from kvkeeper.common.hold.systemd import SystemdStore
from kvkeeper.common.service.listen import SocketLock, get_peer, listen_privately

log = structlog.get_logger()

_MAX_CONNECTIONS = 32
_MAX_SENT = 4  # descriptors that are taken from a packet, to be closed where it may have one


class Holder:
    """Serves at path until `stop` is called, from a signal handler or another thread. Raises AddressInUse."""

    def __init__(self, path: Path, max_held: int, store: SystemdStore) -> None:
        """store: what an earlier process has put there is held from the start."""
        self._max_held = max_held
        self._store = store
        self._lock = SocketLock(path)
        self._listener = listen_privately(path, socket.SOCK_SEQPACKET, _MAX_CONNECTIONS)
        self._listener.setblocking(False)
        self._held = store.take()  # descriptor and number of bytes, by name
        self._connections: list[socket.socket] = []  # that were used last at the end
        self._wake, self._woken = socket.socketpair()
        self._is_stopping = False
        self._selector = selectors.DefaultSelector()
        for one in (self._listener, self._woken):
            self._selector.register(one, selectors.EVENT_READ)

    def serve(self) -> None:
        """Returns after `stop`, with every descriptor closed and the socket removed."""
        self._store.notify_ready()
        log.info("ready", num_held=len(self._held))
        while not self._is_stopping:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._connections:
                    self._answer(key.fileobj)
        self._store.notify_stopping()
        self._close()
        log.info("stopped")

    def stop(self) -> None:
        self._is_stopping = True
        self._wake.send(b"\0")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone already, or no descriptor is left
            connection, _ = self._listener.accept()
            if get_peer(connection).user != os.geteuid():
                _send(connection, {"error": "FOREIGN_USER"})
                connection.close()
                return
            connection.setblocking(False)
            if len(self._connections) >= _MAX_CONNECTIONS:
                self._hang_up(self._connections[0])
            self._connections.append(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES + 1, _MAX_SENT, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            packet, descriptors = b"", []
        try:
            if not packet:
                self._hang_up(connection)
                return
            self._connections.remove(connection)
            self._connections.append(connection)
            try:
                request = decode_request(packet)
                if len(descriptors) != (request.call == "put"):
                    raise HoldRefused("BAD_REQUEST")
                answer, sent = self._do(request, descriptors)
            except HoldRefused as refusal:
                answer, sent = {"error": str(refusal)}, []
        finally:
            for descriptor in descriptors:  # those that are not held now
                os.close(descriptor)
        if not _send(connection, answer, *sent):
            self._hang_up(connection)

    def _do(self, request: Request, descriptors: list[int]) -> tuple[dict[str, object], list[int]]:
        """The answer, and what is sent with it. Takes out of descriptors what is held from now on. Raises HoldRefused."""
        name = request.name
        match request.call:
            case "list":
                return {"held": {held: num_bytes for held, (_, num_bytes) in self._held.items()}}, []
            case "put":
                if name in self._held:
                    raise HoldRefused("NAME_TAKEN")
                if len(self._held) >= self._max_held:
                    raise HoldRefused("FULL")
                self._held[name] = descriptors.pop(), request.num_bytes
                self._store.put(name, request.num_bytes, self._held[name][0])
                log.info("held", num_bytes=request.num_bytes, num_held=len(self._held))
                return {}, []
        if name not in self._held:
            raise HoldRefused("UNKNOWN_NAME")
        descriptor, num_bytes = self._held[name]
        if request.call == "get":
            return {"num_bytes": num_bytes}, [descriptor]
        del self._held[name]
        os.close(descriptor)
        self._store.drop(name, num_bytes)
        log.info("dropped", num_bytes=num_bytes, num_held=len(self._held))
        return {}, []

    def _hang_up(self, connection: socket.socket) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection)
        connection.close()

    def _close(self) -> None:
        for connection in list(self._connections):
            self._hang_up(connection)
        self._selector.close()
        for one in (self._listener, self._wake, self._woken):
            one.close()
        for descriptor, _ in self._held.values():
            os.close(descriptor)
        self._lock.release()


def _send(connection: socket.socket, answer: dict[str, object], *descriptors: int) -> bool:
    """Whether the client's end took it."""
    try:
        socket.send_fds(connection, [json.dumps(answer).encode()], descriptors)
    except OSError:
        return False
    return True
