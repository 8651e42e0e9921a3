"""Files that hold secrets: whether only those may read them who have to, and what to type where it is otherwise."""

import os
import stat
from pathlib import Path

_MOST_BYTES = 1 << 20


class FileRefused(Exception):
    """A file that cannot be used. One line, with the mend where there is one."""


def read_private(path: Path) -> bytes:
    """The contents. Raises FileRefused."""
    return _read(path, is_private=True)


def read_public(path: Path) -> bytes:
    """The contents of a file that holds no secret. Raises FileRefused."""
    return _read(path, is_private=False)


def mode_refusal(path: Path, status: os.stat_result, user: int) -> str | None:
    """Why a file is not private enough for a process of this user, and the mend; None where it is.

    A file of root that another user's service reads was put there by the host's administrator, who lets the service's group
    read it: so Kubernetes mounts secrets.
    """
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a file"
    if status.st_uid not in (0, user):
        return f"{path} belongs to another user: chown {user} {path}"
    is_of_host = status.st_uid == 0 and user != 0
    if status.st_mode & (0o037 if is_of_host else 0o177):
        return f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, which lets others at it: chmod 600 {path}"
    return None


def _read(path: Path, *, is_private: bool) -> bytes:
    try:
        with path.open("rb") as file:
            if is_private and (reason := mode_refusal(path, os.fstat(file.fileno()), os.geteuid())):
                raise FileRefused(reason)
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise FileRefused(f"{path}: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise FileRefused(f"{path} has more than {_MOST_BYTES >> 20} MiB")
    return data


def stat_files(*paths: Path) -> tuple[object, ...]:
    """Differs once one of the files is written or replaced."""
    found: list[object] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            found.append(error.errno)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(found)
