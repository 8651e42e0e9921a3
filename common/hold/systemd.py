"""systemd's store of descriptors, where this process is a unit that has one: the next start gets back what a dead holder had.

Owns the messages of sd_notify and the variables of sd_listen_fds. Rules: without NOTIFY_SOCKET nothing is sent, and with one
that cannot be reached the holder goes on without; a descriptor that was handed in under a name that is not ours is closed. The
size of the memory is part of the name in the store, which holds nothing but names.
"""

import contextlib
import os
import socket
from collections.abc import MutableMapping

from kvkeeper.common.hold.messages import is_name, is_size

_FIRST = 3  # descriptor that is handed in


class SystemdStore:
    """Reads its variables, and takes them out of the environment."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        handed = {name: environ.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES")}
        is_ours = handed["PID"] == str(os.getpid()) and handed["FDS"].isdecimal()
        self._num_handed = int(handed["FDS"]) if is_ours else 0
        self._names = handed["FDNAMES"].split(":")

    def take(self) -> dict[str, tuple[int, int]]:
        """Descriptor and number of bytes by name, of what an earlier process had put there; once."""
        found: dict[str, tuple[int, int]] = {}
        for number in range(self._num_handed):
            descriptor = _FIRST + number
            stored = self._names[number] if number < len(self._names) else ""
            name, _, num_bytes = stored.rpartition("+")
            if is_name(name) and num_bytes.isdecimal() and is_size(int(num_bytes)) and name not in found:
                os.set_inheritable(descriptor, False)
                found[name] = descriptor, int(num_bytes)
            else:
                os.close(descriptor)
        self._num_handed = 0
        return found

    def put(self, name: str, num_bytes: int, descriptor: int) -> None:
        # Without FDPOLL systemd would drop a descriptor that reports an error when it is polled, which devices may.
        self._notify(f"FDSTORE=1\nFDNAME={name}+{num_bytes}\nFDPOLL=0", descriptor)

    def drop(self, name: str, num_bytes: int) -> None:
        self._notify(f"FDSTOREREMOVE=1\nFDNAME={name}+{num_bytes}")

    def notify_ready(self) -> None:
        self._notify("READY=1")

    def notify_stopping(self) -> None:
        self._notify("STOPPING=1")

    def _notify(self, text: str, *descriptors: int) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.connect(self._address)
            socket.send_fds(sender, [text.encode()], descriptors)
