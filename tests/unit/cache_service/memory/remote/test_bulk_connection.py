"""Blocks between arena and socket: what goes out, what comes back, and what is not believed."""

import socket
import threading
from collections.abc import Iterator

import pytest

from kvkeeper.cache_service.memory.remote.bulk_connection import BulkConnection, BulkConnections, Received, Refusal
from kvkeeper.cache_service.memory.remote.remote_address import Node, RemoteAddress, RemoteSecret


class Peer:
    """The server's end of a connection."""

    def __init__(self) -> None:
        ours, self.link = socket.socketpair()
        self.connection = BulkConnection(ours)
        self.link.settimeout(20)
        ours.settimeout(20)

    def heard(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            found += self.link.recv(min(count - len(found), 1 << 16))
        return bytes(found)


@pytest.fixture
def peer() -> Iterator[Peer]:
    found = Peer()
    yield found
    found.connection.close()
    found.link.close()


def buffers(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def test_commands_are_arrays_and_a_block_goes_out_behind_its_header(peer: Peer) -> None:
    wanted = b"*1\r\n$4\r\nPING\r\n*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$6\r\nheblok\r\n"
    peer.link.sendall(b"+PONG\r\n+OK\r\n")
    block = memoryview(b"blok")
    assert peer.connection.exchange([(b"PING",), (b"SET", b"k", (b"he", block))]) == [b"PONG", b"OK"]
    assert peer.heard(len(wanted)) == wanted


def test_large_blocks_go_out_whole_however_the_socket_takes_them(peer: Peer) -> None:
    blocks = [memoryview(bytes([at]) * 300_001) for at in range(1, 40)]
    wanted = b"".join(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$300003\r\nhe%b\r\n" % bytes(block) for block in blocks)
    heard: list[bytes] = []
    thread = threading.Thread(target=lambda: heard.append(peer.heard(len(wanted))))
    thread.start()
    peer.link.sendall(b"+OK\r\n" * len(blocks))
    assert peer.connection.exchange([(b"SET", b"k", (b"he", block)) for block in blocks]) == [b"OK"] * len(blocks)
    thread.join()
    assert heard == [wanted]


def test_answers_of_every_kind(peer: Peer) -> None:
    peer.link.sendall(b":12\r\n$-1\r\n-WRONG of it\r\n$3\r\nabc\r\n$0\r\n\r\n")
    assert peer.connection.exchange([(b"X",)] * 5) == [12, None, Refusal("WRONG of it"), b"abc", b""]


def test_a_value_lies_in_its_buffers_and_one_of_another_length_does_not(peer: Peer) -> None:
    first, second = buffers(2, 4), buffers(2, 4)
    peer.link.sendall(b"$2\r\nER\r\n$6\r\nheblok\r\n$5\r\nshort\r\n")
    answers = peer.connection.exchange([(b"GET", b"e"), (b"GET", b"a"), (b"GET", b"b")], [first, second])
    assert answers == [b"ER", Received(), b"short"]
    assert [bytes(each) for each in first] == [b"he", b"blok"]
    assert [bytes(each) for each in second] == [bytes(2), bytes(4)]


@pytest.mark.parametrize(
    "told", [b"$70000\r\n", b"$-2\r\n", b"$x\r\n", b"*1\r\n:1\r\n", b"?\r\n", b"$1\r\nab\r\n", b"+" + b"a" * 5000 + b"\r\n"]
)
def test_what_was_not_asked_for_is_not_believed(peer: Peer, told: bytes) -> None:
    peer.link.sendall(told)
    peer.link.shutdown(socket.SHUT_WR)
    with pytest.raises((ValueError, ConnectionError)):
        peer.connection.exchange([(b"GET", b"a")])


def test_a_server_that_goes_in_the_middle_of_a_value_is_an_error(peer: Peer) -> None:
    peer.link.sendall(b"$6\r\nhebl")
    peer.link.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError):
        peer.connection.exchange([(b"GET", b"a")], [buffers(2, 4)])


def serve(listener: socket.socket, answers: list[bytes], heard: list[bytes]) -> threading.Thread:
    """Returns one connection for each, with the whole answer at once."""

    def run() -> None:
        for answer in answers:
            link, _ = listener.accept()
            link.sendall(answer)
            with link:
                while part := link.recv(4096):
                    heard.append(part)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_connections_say_who_they_are_and_are_kept_until_one_breaks() -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = serve(listener, [b"+OK\r\n+OK\r\n+a\r\n+b\r\n", b"+OK\r\n+OK\r\n+c\r\n", b"-NOAUTH\r\n+OK\r\n"], heard)
        node = Node("127.0.0.1", listener.getsockname()[1])
        found = BulkConnections(
            node, RemoteAddress((node,), 3, is_tls=False), RemoteSecret("key of a test 123", "user", "pass"), 20.0
        )
        for wanted in (b"a", b"b"):
            with found.one() as connection:
                assert connection.exchange([(b"PING",)]) == [wanted]
        with pytest.raises(ZeroDivisionError), found.one():
            raise ZeroDivisionError
        with found.one() as connection:
            assert connection.exchange([(b"PING",)]) == [b"c"]
        found.close()
        with pytest.raises(ConnectionRefusedError), found.one():
            raise AssertionError("it was not let in")
        thread.join()
    hello = b"*3\r\n$4\r\nAUTH\r\n$4\r\nuser\r\n$4\r\npass\r\n*2\r\n$6\r\nSELECT\r\n$1\r\n3\r\n"
    ping = b"*1\r\n$4\r\nPING\r\n"
    assert b"".join(heard) == hello + ping * 2 + hello + ping + hello
