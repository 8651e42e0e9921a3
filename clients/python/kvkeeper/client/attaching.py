"""The attach socket as a client meets it: a token and the wanted parts out, one line and descriptors in.

Knows the exchange, not the parts: arena.py maps memory, step_lane.py steps. A token is good for one attach. No error names a
path.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from kvkeeper.client.errors import KvkeeperError

_MAX_REPLY_BYTES = 4096
_MAX_DESCRIPTORS = 4


@dataclass(frozen=True, slots=True)
class Handover:
    """The answer: the line's fields and the descriptors of the parts, in the order of the parts."""

    connection: socket.socket
    fields: dict[str, object]
    descriptors: list[int]

    def take_lane(self) -> socket.socket | None:
        """The socket for steps, now the caller's; None where the service had none to give."""
        if self.fields.get("step_lane") is not True or not self.descriptors:
            return None
        return socket.socket(fileno=self.descriptors.pop())


@contextlib.contextmanager
def attaching(path: str, token: str, timeout_s: float, *parts: str) -> Iterator[Handover]:
    """The answer of the attach socket, within the time given. The connection is the caller's unless the body fails.

    Descriptors that the body has not taken out are closed after it. Raises KvkeeperError.
    """
    if not path:
        text = "the service is on another host, and its memory can be mapped on its own alone"
        raise KvkeeperError(grpc.StatusCode.FAILED_PRECONDITION, message=text)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors: list[int] = []
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(" ".join([token, *parts]).encode() + b"\n")
        fields = _parse(_receive_line(connection, descriptors))
        if "error" in fields:
            reason = str(fields["error"])
            raise KvkeeperError(grpc.StatusCode.PERMISSION_DENIED, reason, f"attach refused: {reason}")
        connection.settimeout(None)
        yield Handover(connection, fields, descriptors)
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
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _receive_line(connection: socket.socket, descriptors: list[int]) -> bytes:
    """Appends what comes beside the line to descriptors."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_REPLY_BYTES:
        data, received, _, _ = socket.recv_fds(connection, _MAX_REPLY_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        descriptors += received
        if not data:
            raise KvkeeperError(grpc.StatusCode.UNAVAILABLE, message="the attach socket closed without an answer")
        line += data
    return line


def _parse(line: bytes) -> dict[str, object]:
    reply: object = None
    with contextlib.suppress(ValueError):
        reply = json.loads(line)
    if not isinstance(reply, dict):
        raise KvkeeperError(grpc.StatusCode.INTERNAL, message="the attach socket answered nonsense")
    return reply
