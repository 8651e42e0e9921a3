"""An address that processes of one service share: found free first, and held while none of them listens."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeeper.common.service.endpoint import SharedAddress
from kvkeeper.common.service.listen import AddressInUse

_OTHER_USER = 65534  # nobody's, on most systems; the kernel asks for no name
_BIND_AS = """
import os, socket, sys
user, port = map(int, sys.argv[1:])
os.setuid(user)
joining = socket.socket()
joining.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
try:
    joining.bind(("127.0.0.1", port))
except OSError as error:
    print(error.errno)
else:
    print(0)
"""


def error_of_bind(user: int, port: int) -> int:
    """The errno with which a process of a user does not join the port, though it asks to share it; 0: it joins."""
    found = subprocess.run([sys.executable, "-c", _BIND_AS, str(user), str(port)], capture_output=True, text=True, check=True)
    return int(found.stdout)


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


@pytest.mark.skipif(os.geteuid() != 0, reason="a process takes another user's id only where the tests run as root")
def test_a_process_of_another_user_does_not_get_the_port_also_where_it_asks_to_share_it() -> None:
    held = SharedAddress("127.0.0.1:0")
    port = port_of(held.address)
    assert error_of_bind(os.geteuid(), port) == 0, "one of the same user joins"
    assert error_of_bind(_OTHER_USER, port) == errno.EADDRINUSE
    assert error_of_bind(_OTHER_USER, 0) == 0, "any other port it gets"
    held.release()


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
