"""Where the service may listen: one live service per Unix socket, nothing left behind by dead ones.

gRPC binds over an existing socket file without a word, so a lock file beside it says whether its owner lives: the
kernel drops the lock with the process. Files that are no sockets are left alone.
"""

import fcntl
import os
import stat
from pathlib import Path


class AddressInUse(Exception):
    """Somebody else serves there, or something there is not ours to remove. One line."""


class SocketLock:
    """Exclusive right to a Unix socket's path for as long as this process lives. Raises AddressInUse."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock_path = path, Path(f"{path}.lock")
        while (descriptor := self._try_lock()) is None:
            pass
        self._descriptor = descriptor
        if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
            self._unlock()
            raise AddressInUse(f"{path} exists and is not a socket")
        path.unlink(missing_ok=True)

    def release(self) -> None:
        """Remove the socket and the lock file."""
        self._path.unlink(missing_ok=True)
        self._unlock()

    def _try_lock(self) -> int | None:
        """None when the file's owner removed it between our open and our lock."""
        try:
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise AddressInUse(f"cannot make a socket at {self._path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(self._lock_path)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise AddressInUse(f"another service listens on {self._path}") from None
        except FileNotFoundError:
            pass
        os.close(descriptor)
        return None

    def _unlock(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        os.close(self._descriptor)
