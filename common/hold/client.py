"""HolderClient: a connection to a holder. Owns its timeout, and that nothing is sent to another user's process."""

import os
import socket
import struct
from typing import NamedTuple

from kvkeeper.common.hold.messages import MAX_ANSWER_BYTES, HoldRefused, Request, decode_answer, is_name, is_size
from kvkeeper.common.service.listen import get_peer, socket_path

_TIMEOUT = 2.0  # seconds; the holder never waits for anything


class HolderAway(Exception):
    """There is no holder that responds. The text is one line without the address."""


class Held(NamedTuple):
    """What was held under a name. descriptor: the caller's to close."""

    descriptor: int
    num_bytes: int


class HolderClient:
    """One connection; a call at a time. The calls raise HolderAway and HoldRefused. Use it in a with statement."""

    def __init__(self, address: str) -> None:
        """address: unix:/path. Raises HolderAway."""
        path = socket_path(address)
        assert path is not None, "checked by the config"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # With a timeout of Python's, a connect would fail at once where others wait to be accepted.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_TIMEOUT), 0))
            self._socket.connect(os.fspath(path))
            self._socket.settimeout(_TIMEOUT)
            is_ours = get_peer(self._socket).user == os.geteuid()
        except OSError as error:
            self._socket.close()
            raise HolderAway(f"no holder can be reached: {error.strerror or 'it does not answer'}") from None
        if not is_ours:
            self._socket.close()
            raise HolderAway("the holder belongs to another user")

    def __enter__(self) -> "HolderClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Readable without a call when the holder has ended."""
        return self._socket.fileno()

    def put(self, name: str, num_bytes: int, descriptor: int) -> None:
        """The holder has a descriptor of its own from now on."""
        self._call(Request("put", name, num_bytes), descriptor)

    def get(self, name: str) -> Held:
        fields, descriptors = self._call(Request("get", name))
        num_bytes = fields.get("num_bytes")
        if len(descriptors) != 1 or not isinstance(num_bytes, int) or not is_size(num_bytes):
            for descriptor in descriptors:
                os.close(descriptor)
            raise HoldRefused("BAD_ANSWER")
        return Held(descriptors[0], num_bytes)

    def held(self) -> dict[str, int]:
        """Numbers of bytes by name."""
        fields, _ = self._call(Request("list"))
        held = fields.get("held")
        if not isinstance(held, dict) or not all(is_name(name) and is_size(num_bytes) for name, num_bytes in held.items()):
            raise HoldRefused("BAD_ANSWER")
        return held

    def drop(self, name: str) -> None:
        self._call(Request("drop", name))

    def _call(self, request: Request, *descriptors: int) -> tuple[dict[str, object], list[int]]:
        try:
            socket.send_fds(self._socket, [request.encode()], descriptors)
            packet, received, _, _ = socket.recv_fds(self._socket, MAX_ANSWER_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise HolderAway(f"the holder is gone: {error.strerror or 'it does not answer'}") from None
        try:
            if not packet:
                raise HolderAway("the holder is gone")
            return decode_answer(packet), received
        except BaseException:
            for descriptor in received:
                os.close(descriptor)
            raise
