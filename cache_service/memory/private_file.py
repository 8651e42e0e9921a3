"""Files of this user alone, which a later run of the service opens again."""

import os
import stat
from pathlib import Path

from kvkeeper.common.service.memory_limit import OutOfMemory

from .shared_memory import reserve_pages


class FileRefused(Exception):
    """A file is not what a run of this service has left. The text says why, in a few words."""


def open_file(path: Path) -> int:
    """A descriptor of a regular file that is this user's alone. Raises FileRefused."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise FileRefused(f"it cannot be opened: {error.strerror}") from None
    status = os.fstat(descriptor)
    is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077 and status.st_nlink == 1
    if not stat.S_ISREG(status.st_mode) or not is_ours:
        os.close(descriptor)
        raise FileRefused("it is not a file of this user alone")
    return descriptor


def make_file(path: Path, num_bytes: int, *, has_pages: bool = True) -> int:
    """A descriptor of a new file of so many bytes, all zero and with their pages. Raises OutOfMemory.

    has_pages: else the file has its size alone, and stands for memory that is elsewhere.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise OutOfMemory(f"no file can be made: {error.strerror}") from None
    if not has_pages:
        os.ftruncate(descriptor, num_bytes)
        return descriptor
    try:
        reserve_pages(descriptor, num_bytes)
    except OutOfMemory:
        path.unlink()
        raise
    return descriptor
