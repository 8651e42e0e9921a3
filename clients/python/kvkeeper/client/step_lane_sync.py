"""The client's end of a step lane for threads: the same frames as in step_lane.py, blocking, within a time."""

import contextlib
import errno
import socket

import grpc

from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.step_lane import STEP_REQUEST, LaneBroken, MessageTooLarge, answer_of


class BlockingStepLane:
    """Takes the socket over. Not for use from two threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # Both ends have the same size, and no frame is larger than it.
        self._frame = bytearray(connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))

    @property
    def is_open(self) -> bool:
        """Whether this side has not ended it."""
        return self._socket.fileno() != -1

    def exchange(self, request: bytes, timeout_s: float) -> bytes:
        """The answer to a step. Raises KvkeeperError where the service refused it or is late, LaneBroken, MessageTooLarge.

        All but a refusal and MessageTooLarge end the lane: a late answer would be taken for that of the next step.
        """
        if not self.is_open:
            raise LaneBroken
        try:
            self._socket.settimeout(timeout_s)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the service's last frame may tell why
                self._socket.send(STEP_REQUEST + request)
            return self._read()
        except TimeoutError:
            self.close()
            raise KvkeeperError(grpc.StatusCode.DEADLINE_EXCEEDED, message="no answer to a step in time") from None
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise MessageTooLarge from None
            self.close()
            raise LaneBroken from None
        except LaneBroken:
            self.close()
            raise

    def close(self) -> None:
        """End the lane. Idempotent."""
        self._socket.close()

    def _read(self) -> bytes:
        while True:
            try:
                num_bytes = self._socket.recv_into(self._frame, 0, socket.MSG_TRUNC)
            except ConnectionResetError:  # told before the frames that were sent before it
                continue
            return answer_of(self._frame, num_bytes)
