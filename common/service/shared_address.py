"""SharedAddress: an address that several processes of one service listen at, held for as long as the service lives.

The service finds the address free, as one that listens by itself does. Then it holds the port with a socket that listens to
nothing: the kernel lets only processes of the same user join it, and divides connections among those that listen. A process
that ends can so be started again while no other process takes its place. A Unix socket cannot be shared; it has one process.
"""

import socket

from kvkeeper.common.service.listen import SocketLock, check_port, socket_path
from kvkeeper.common.service.process import StartError


class SharedAddress:
    """address: with the port that was had, where 0 was asked for. Raises StartError, AddressInUse."""

    def __init__(self, listen: str) -> None:
        self.address = listen
        self._lock: SocketLock | None = None
        self._held: list[socket.socket] = []
        path = socket_path(listen)
        if path is not None:
            self._lock = SocketLock(path)
            return
        host, _, number = listen.rpartition(":")
        if number != "0":
            check_port(host.strip("[]"), int(number))
        port = int(number)
        try:
            for family, kind, _, _, where in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
                held = socket.socket(family, kind)
                self._held.append(held)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                held.bind((where[0], port, *where[2:]))
                port = held.getsockname()[1]
        except OSError as error:
            self.release()
            raise StartError(f"--listen {listen}: {error.strerror or error}") from None
        self.address = f"{host}:{port}"

    def release(self) -> None:
        """Gives the address back: removes a Unix socket and its lock file."""
        for held in self._held:
            held.close()
        if self._lock is not None:
            self._lock.release()
