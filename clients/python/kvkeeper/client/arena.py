"""Attaching to a pool's memory: the attach socket hands over a memfd, and one of the host tier where there is one.

The connection stays open for as long as the memory is mapped, because the service takes its end as the end of the
mapping and may then hand the blocks to somebody else. A token is good for one attach. No error names a path.
"""

import contextlib
import json
import mmap
import os
import socket

import grpc
import numpy as np
import numpy.typing as npt

from kvkeeper.client.errors import KvkeeperError

_MAX_REPLY_BYTES = 4096


class Arena:
    """Memory of a pool, shared with the cache service and with every engine attached to it."""

    def __init__(self, memory: mmap.mmap, connection: socket.socket, host_memory: mmap.mmap | None = None) -> None:
        self._memories = [memory] if host_memory is None else [memory, host_memory]
        self._connection = connection
        self._arrays: list[npt.NDArray[np.uint8]] = _views(self._memories)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes [arena_bytes], writable."""
        return self._part(0)

    @property
    def host_array(self) -> npt.NDArray[np.uint8]:
        """All bytes of the host tier [host_arena_bytes], writable; none where there is no host tier."""
        return self._part(1) if len(self._memories) > 1 else np.empty(0, np.uint8)

    def _part(self, which: int) -> npt.NDArray[np.uint8]:
        if not self._arrays:
            raise ValueError("the arena is closed")
        return self._arrays[which]

    def close(self) -> None:
        """Unmap, then let the service know. Idempotent.

        Raises BufferError, and stays attached, while a view of the array lives: its memory could be written still.
        """
        if self._connection.fileno() == -1:
            return
        self._arrays = []
        try:
            for memory in self._memories[::-1]:
                memory.close()
                self._memories.pop()
        except BufferError:
            self._arrays = _views(self._memories)
            raise
        self._connection.close()


def _views(memories: list[mmap.mmap]) -> list[npt.NDArray[np.uint8]]:
    return [np.frombuffer(memory, np.uint8) for memory in memories]


def attach_arena(path: str, token: str, num_bytes: int, timeout_s: float, num_host_bytes: int = 0) -> Arena:
    """Attach within the time given. The sizes are what the pool said its arenas have. Raises KvkeeperError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(token.encode() + b"\n")
        memories = _receive_memory(connection, [num_bytes, num_host_bytes] if num_host_bytes else [num_bytes])
        connection.settimeout(None)
        return Arena(memories[0], connection, *memories[1:])
    except TimeoutError:
        connection.close()
        raise KvkeeperError(grpc.StatusCode.DEADLINE_EXCEEDED, message="the attach socket did not answer in time") from None
    except OSError as error:
        connection.close()
        raise KvkeeperError(
            grpc.StatusCode.UNAVAILABLE, message=f"the attach socket cannot be used: {os.strerror(error.errno or 0)}"
        ) from None
    except BaseException:
        connection.close()
        raise


def _receive_memory(connection: socket.socket, sizes: list[int]) -> list[mmap.mmap]:
    line, descriptors = _receive_line(connection)
    try:
        reply = _parse(line)
        if "error" in reply:
            raise KvkeeperError(grpc.StatusCode.PERMISSION_DENIED, message=f"attach refused: {reply['error']}")
        if reply.get("kind") != "memfd" or len(descriptors) != len(sizes):
            raise KvkeeperError(grpc.StatusCode.UNIMPLEMENTED, message="this client maps a memfd arena only")
        # The size of the file counts, not what the line says: a map past its end is a SIGBUS later.
        told = [reply.get("num_bytes"), reply.get("num_host_bytes")][: len(sizes)]
        pairs = list(zip(descriptors, sizes, strict=True))
        if told != sizes or any(os.fstat(descriptor).st_size < num_bytes for descriptor, num_bytes in pairs):
            raise KvkeeperError(grpc.StatusCode.INTERNAL, message="the arena has another size than the pool")
        return [mmap.mmap(descriptor, num_bytes) for descriptor, num_bytes in pairs]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _receive_line(connection: socket.socket) -> tuple[bytes, list[int]]:
    line, descriptors = b"", []
    try:
        while not line.endswith(b"\n") and len(line) < _MAX_REPLY_BYTES:
            data, received, _, _ = socket.recv_fds(connection, _MAX_REPLY_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
            descriptors += received
            if not data:
                raise KvkeeperError(grpc.StatusCode.UNAVAILABLE, message="the attach socket closed without an answer")
            line += data
        return line, descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _parse(line: bytes) -> dict[str, object]:
    reply: object = None
    with contextlib.suppress(ValueError):
        reply = json.loads(line)
    if not isinstance(reply, dict):
        raise KvkeeperError(grpc.StatusCode.INTERNAL, message="the attach socket answered nonsense")
    return reply
