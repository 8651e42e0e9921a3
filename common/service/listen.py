"""Where a service may listen: one live service per address, and no leftovers of dead ones.

gRPC binds over an existing socket file without an error, so a lock file beside each Unix socket shows whether its owner lives:
the kernel drops the lock with the process. Stale sockets are removed; files that are no sockets are left alone.
"""

import errno
import fcntl
import os
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class AddressInUse(Exception):
    """Another service has the address, or a file is there that must not be removed. The text is one line."""


def socket_path(listen: str) -> Path | None:
    """The path of a Unix socket's address, else None."""
    return Path(listen.removeprefix("unix:")) if listen.startswith("unix:") else None


class Peer(NamedTuple):
    """The process and the user at the other end of a Unix socket."""

    process: int
    user: int


def get_peer(connection: socket.socket) -> Peer:
    """As the kernel names them. Raises OSError."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return Peer(process, user)


def is_of_this_host(peer: str) -> bool:
    """Whether a caller, as gRPC names it, came over a Unix socket or from an address of this host, loopback or another."""
    if peer.startswith("unix:"):
        return True
    kind, _, address = unquote(peer).partition(":")
    host = address.rpartition(":")[0].strip("[]")
    with socket.socket(socket.AF_INET6 if kind == "ipv6" else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))  # which the system grants for addresses of its own alone
        except OSError:
            return False
    return bool(host)


def listen_privately(path: Path, kind: socket.SocketKind, backlog: int) -> socket.socket:
    """A listening Unix socket that only this user may open. The caller has its path, see SocketLock. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    old_mask = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    finally:
        os.umask(old_mask)
    listener.listen(backlog)
    return listener


class SocketLock:
    """Exclusive right to a Unix socket's path for as long as this process lives. Raises AddressInUse."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_folder(path.parent)
        self._lock_path = path.with_name(path.name + ".lock")
        self._descriptor = self._lock()
        try:
            self._remove_stale_socket()
        except AddressInUse:
            self._unlock()
            raise

    def release(self) -> None:
        """Removes the socket and the lock file."""
        self.path.unlink(missing_ok=True)
        self._unlock()

    def _lock(self) -> int:
        while True:
            try:
                descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise AddressInUse(f"cannot make a socket at {self.path}: {error.strerror}") from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), os.stat(self._lock_path)):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                raise AddressInUse(f"another service listens on {self.path}") from None
            except FileNotFoundError:
                pass
            os.close(descriptor)  # its owner removed it between this open and this lock: take the new file

    def _unlock(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _remove_stale_socket(self) -> None:
        try:
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise AddressInUse(f"{self.path} exists and is not a socket")
        except FileNotFoundError:
            return
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(os.fspath(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
                return
            except OSError as error:
                raise AddressInUse(f"cannot make a socket at {self.path}: {error.strerror}") from None
        raise AddressInUse(f"another program listens on {self.path}")


def _check_folder(folder: Path) -> None:
    """Raises AddressInUse where everybody may put another socket in the place of one there."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return  # reported by what makes the socket
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise AddressInUse(f"everybody may replace files in {folder}: chmod o-w {folder}")


def check_free(listen: str) -> None:
    """Raises AddressInUse where another process has the address; gRPC would fail with a log line of its own."""
    if (path := socket_path(listen)) is not None:
        SocketLock(path).release()
        return
    name, _, number = listen.rpartition(":")
    host, port = name.strip("[]"), int(number)
    if not port:
        return
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC sets it: lingering connections do not count
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise AddressInUse(f"another program listens on {host}:{port}") from None
