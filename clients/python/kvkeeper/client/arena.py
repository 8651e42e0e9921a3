"""Attaching to a pool's memory: the attach socket hands over a memfd, which this process maps.

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

    def __init__(self, memory: mmap.mmap, connection: socket.socket) -> None:
        self._memory = memory
        self._connection = connection
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes [arena_bytes], writable."""
        if self._array is None:
            raise ValueError("the arena is closed")
        return self._array

    def close(self) -> None:
        """Unmap, then let the service know. Idempotent.

        Raises BufferError, and stays attached, while a view of the array lives: its memory could be written still.
        """
        if self._connection.fileno() == -1:
            return
        self._array = None
        try:
            self._memory.close()
        except BufferError:
            self._array = np.frombuffer(self._memory, np.uint8)
            raise
        self._connection.close()


def attach_arena(path: str, token: str, num_bytes: int, timeout_s: float) -> Arena:
    """Attach within the time given. num_bytes is what the pool said its arena has. Raises KvkeeperError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(token.encode() + b"\n")
        memory = _receive_memory(connection, num_bytes)
        connection.settimeout(None)
        return Arena(memory, connection)
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


def _receive_memory(connection: socket.socket, num_bytes: int) -> mmap.mmap:
    line, descriptors = _receive_line(connection)
    try:
        reply = _parse(line)
        if "error" in reply:
            raise KvkeeperError(grpc.StatusCode.PERMISSION_DENIED, message=f"attach refused: {reply['error']}")
        if reply.get("kind") != "memfd" or len(descriptors) != 1:
            raise KvkeeperError(grpc.StatusCode.UNIMPLEMENTED, message="this client maps a memfd arena only")
        # The size of the file counts, not what the line says: a map past its end is a SIGBUS later.
        if reply.get("num_bytes") != num_bytes or os.fstat(descriptors[0]).st_size < num_bytes:
            raise KvkeeperError(grpc.StatusCode.INTERNAL, message="the arena has another size than the pool")
        return mmap.mmap(descriptors[0], num_bytes)
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
