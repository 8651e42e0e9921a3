"""An address that processes of one service share: found free first, and held while none of them listens."""

import os
import socket
from pathlib import Path

import pytest

from kvkeeper.service.listen import AddressInUse
from kvkeeper.service.shared_address import SharedAddress


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def listener(port: int, *, joins: bool) -> socket.socket:
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(joins))
    try:
        found.bind(("127.0.0.1", port))
    except OSError:
        found.close()
        raise
    found.listen()
    return found


def test_a_port_that_is_taken_is_refused() -> None:
    with listener(0, joins=True) as other, pytest.raises(AddressInUse, match="another program listens"):
        SharedAddress(f"127.0.0.1:{other.getsockname()[1]}")


def test_processes_of_the_service_share_the_port_and_nobody_else_gets_it() -> None:
    held = SharedAddress("127.0.0.1:0")
    port = port_of(held.address)
    with listener(port, joins=True), listener(port, joins=True):
        pass
    with pytest.raises(OSError, match="in use"):  # also now, while none of them listens
        listener(port, joins=False)
    with pytest.raises(AddressInUse):
        SharedAddress(held.address)
    held.release()
    SharedAddress(held.address).release()


def test_connections_come_to_those_that_listen() -> None:
    held = SharedAddress("127.0.0.1:0")
    with listener(port_of(held.address), joins=True) as ours:
        for _ in range(20):  # the socket that holds the port takes none of them
            with socket.create_connection(("127.0.0.1", port_of(held.address)), timeout=10):
                ours.accept()[0].close()
    held.release()


def test_a_unix_socket_has_its_lock(tmp_path: Path) -> None:
    held = SharedAddress(f"unix:{tmp_path}/socket")
    with pytest.raises(AddressInUse, match="another service listens"):
        SharedAddress(held.address)
    held.release()
    assert os.listdir(tmp_path) == []
