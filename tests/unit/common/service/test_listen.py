"""One live service per Unix socket, and nothing of dead ones in the way."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeeper.common.service.listen import AddressInUse, SocketLock, check_free, is_of_this_host


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        yield Path(folder) / "s"


def test_a_second_owner_is_refused_while_the_first_lives(path: Path) -> None:
    first = SocketLock(path)
    with pytest.raises(AddressInUse, match="another service listens"):
        SocketLock(path)
    first.release()
    SocketLock(path).release()
    assert list(path.parent.iterdir()) == []


def test_a_stale_socket_is_removed(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    lock = SocketLock(path)
    assert not path.exists()
    lock.release()


def test_a_refusal_leaves_no_lock(path: Path) -> None:
    path.write_text("a file")
    with pytest.raises(AddressInUse, match="is not a socket"):
        SocketLock(path)
    assert [item.name for item in path.parent.iterdir()] == ["s"]


def test_a_missing_folder_is_told(path: Path) -> None:
    with pytest.raises(AddressInUse, match="No such file"):
        SocketLock(path / "deeper" / "s")


def test_a_port_in_use_is_told() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(AddressInUse, match=str(port)):
            check_free(f"127.0.0.1:{port}")
    check_free(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("peer", "is_near"),
    [
        ("unix:", True),
        ("unix:/run/x", True),
        ("ipv4:127.0.0.1:5", True),
        ("ipv4:127.9.9.9:5", True),
        ("ipv6:%5B::1%5D:5", True),
        ("ipv6:[::1]:5", True),
        ("ipv4:192.0.2.7:5", False),  # of the addresses for documentation
        ("ipv6:%5B2001:db8::7%5D:5", False),
        ("", False),
        ("unknown", False),
    ],
)
def test_a_caller_is_of_this_host_by_its_address(peer: str, is_near: bool) -> None:
    assert is_of_this_host(peer) == is_near
