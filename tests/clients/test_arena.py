"""Attaching: the memory is the service's own, the connection lasts as long as the mapping, bad answers map nothing."""

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client import AsyncCacheSession, CallOptions, KvkeeperError
from kvkeeper.client.arena import attach_arena
from kvkeeper.client.transport import AsyncTransport

NUM_BYTES = 8192
TOKEN = "one-time"


class AttachSocket:
    """The service's end: reads the token, runs one answer, keeps the connection."""

    def __init__(self, path: Path, answer: Callable[[socket.socket], None]) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._answer = answer
        self.token = b""
        self.connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self.connection, _ = self._listener.accept()
        while not self.token.endswith(b"\n"):
            self.token += self.connection.recv(64)
        self._answer(self.connection)

    def close(self) -> None:
        self._thread.join(5)
        self._listener.close()
        if self.connection is not None:
            self.connection.close()


@pytest.fixture
def memfd():  # type: ignore[no-untyped-def]
    descriptor = os.memfd_create("arena")
    os.truncate(descriptor, NUM_BYTES)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def attach_socket(folder: Path):  # type: ignore[no-untyped-def]
    opened: list[AttachSocket] = []

    def make(answer: Callable[[socket.socket], None]) -> AttachSocket:
        opened.append(AttachSocket(folder / "attach", answer))
        return opened[-1]

    yield make
    for service in opened:
        service.close()


def hand_over(memfd: int, **reply: object) -> Callable[[socket.socket], None]:
    line = json.dumps({"kind": "memfd", "num_bytes": NUM_BYTES, **reply}).encode() + b"\n"
    return lambda connection: socket.send_fds(connection, [line], [memfd])  # type: ignore[return-value]


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_the_memory_is_shared_both_ways_until_close(memfd: int, attach_socket) -> None:  # type: ignore[no-untyped-def]
    service = attach_socket(hand_over(memfd))
    arena = attach_arena(service.path, TOKEN, NUM_BYTES, 5)
    assert service.token == b"one-time\n"
    arena.array[5:8] = [1, 2, 3]
    assert os.pread(memfd, 3, 5) == bytes([1, 2, 3])
    os.pwrite(memfd, b"\x09", NUM_BYTES - 1)
    assert arena.array[-1] == 9
    assert (arena.array.dtype, arena.array.shape) == (np.uint8, (NUM_BYTES,))

    service.connection.setblocking(False)
    with pytest.raises(BlockingIOError):  # still connected
        service.connection.recv(1)
    arena.close()
    assert service.connection.recv(1) == b""
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        _ = arena.array


def test_an_arena_with_views_of_its_memory_stays_attached(memfd: int, attach_socket) -> None:  # type: ignore[no-untyped-def]
    service = attach_socket(hand_over(memfd))
    arena = attach_arena(service.path, TOKEN, NUM_BYTES, 5)
    view = arena.array[:4]
    with pytest.raises(BufferError):
        arena.close()
    service.connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        service.connection.recv(1)
    view[0] = 1
    del view
    arena.close()
    assert service.connection.recv(1) == b""


def reply_of(line: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)

    return answer


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"error": "unknown token"}\n', grpc.StatusCode.PERMISSION_DENIED),
        (b'{"kind": "cuda"}\n', grpc.StatusCode.UNIMPLEMENTED),
        (b'{"kind": "memfd", "num_bytes": 8192}\n', grpc.StatusCode.UNIMPLEMENTED),  # without a descriptor
        (b"nonsense\n", grpc.StatusCode.INTERNAL),
        (b"[1]\n", grpc.StatusCode.INTERNAL),
        (b'{"kind"', grpc.StatusCode.UNAVAILABLE),
        (b"", grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_an_answer_without_memory_is_one_error(attach_socket, line: bytes, code: grpc.StatusCode) -> None:  # type: ignore[no-untyped-def]
    service = attach_socket(reply_of(line))
    with pytest.raises(KvkeeperError) as caught:
        attach_arena(service.path, TOKEN, NUM_BYTES, 5)
    assert caught.value.code is code
    assert service.path not in str(caught.value)


@pytest.mark.parametrize("num_bytes", [NUM_BYTES // 2, 2 * NUM_BYTES])
def test_memory_of_another_size_is_not_mapped(memfd: int, attach_socket, num_bytes: int) -> None:  # type: ignore[no-untyped-def]
    service = attach_socket(hand_over(memfd, num_bytes=num_bytes))
    before = open_descriptors()
    with pytest.raises(KvkeeperError, match="another size"):
        attach_arena(service.path, TOKEN, 2 * NUM_BYTES, 5)
    service.close()
    assert open_descriptors() <= before


def test_a_silent_socket_meets_the_deadline(attach_socket) -> None:  # type: ignore[no-untyped-def]
    service = attach_socket(lambda connection: None)
    with pytest.raises(KvkeeperError) as caught:
        attach_arena(service.path, TOKEN, NUM_BYTES, 0.05)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_attach_that_was_abandoned_does_not_stay_mapped(memfd: int, attach_socket) -> None:  # type: ignore[no-untyped-def]
    asked, go_on = threading.Event(), threading.Event()

    def answer(connection: socket.socket) -> None:
        asked.set()
        assert go_on.wait(5)
        hand_over(memfd)(connection)

    service = attach_socket(answer)
    opened = pb.OpenSessionResponse(attach_socket_path=service.path, attach_token=TOKEN)
    opened.pool.arena_bytes = NUM_BYTES
    session = AsyncCacheSession(AsyncTransport("127.0.0.1:1", CallOptions(), None), opened)
    attaching = asyncio.create_task(session.attach())
    assert await asyncio.to_thread(asked.wait, 5)
    attaching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attaching
    go_on.set()
    assert await asyncio.to_thread(service.connection.recv, 1) == b""  # unmapped, and told so


def test_a_missing_socket_is_a_service_that_is_down(tmp_path: Path) -> None:
    with pytest.raises(KvkeeperError) as caught:
        attach_arena(str(tmp_path / "none"), TOKEN, NUM_BYTES, 1)
    assert caught.value.service_down
    assert str(tmp_path) not in str(caught.value)
