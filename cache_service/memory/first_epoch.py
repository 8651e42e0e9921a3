"""The first epoch of each run of the service: larger than every epoch of the runs before, whatever was done to the clock.

It is the time, in microseconds since 1970, so that services whose folder is new, or on another host, begin with a larger one,
too. Each run leaves its first epoch in the folder of the attach socket, with the time since boot. So where the clock was set
back the next run still goes on from there: in the same boot by the time that has passed since, in which a run opens far less
than one session a microsecond; after a boot by as much as no run opens. Without the file the clock alone is left.
"""

import errno
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

import structlog

from .private_file import private_directory

log = structlog.get_logger()

FILE = "epoch"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOST_SESSIONS = 1 << 32  # of a run
_LINE = re.compile(rb"(\d{1,18}) (\d{1,18}) ([0-9a-f-]{36})\n")


class _Moment(NamedTuple):
    """microseconds: since the boot of this id, which is zeros where the system does not show it."""

    microseconds: int
    boot_id: str


def first_epoch(folder: Path) -> int:
    """The first epoch of a run that begins now. Raises AddressInUse where the folder is not this user's alone."""
    path, begin = private_directory(folder) / FILE, _now()
    first = max(time.time_ns() // 1000, _least(path, begin))
    try:
        _write(path, f"{first} {begin.microseconds} {begin.boot_id}\n".encode())
    except OSError as error:
        log.warning("epoch_not_kept", why=error.strerror)
    return first


def _now() -> _Moment:
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        boot_id = "0" * 36
    return _Moment(time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000, boot_id)


def _least(path: Path, begin: _Moment) -> int:
    """The least that is larger than the epochs of the run that wrote the file; 0 where it says nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = _LINE.fullmatch(os.read(descriptor, 256))
        finally:
            os.close(descriptor)
    except OSError:
        return 0
    if found is None:
        return 0
    first, since, boot_id = int(found[1]), int(found[2]), found[3].decode()
    is_same_boot = boot_id == begin.boot_id and since <= begin.microseconds
    return first + (begin.microseconds - since if is_same_boot else _MOST_SESSIONS)


def _write(path: Path, line: bytes) -> None:
    """All of it or nothing. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
