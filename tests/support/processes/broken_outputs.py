"""Places for the output of a process where nothing can be written, or where nothing is read."""

import os
import pty
from collections.abc import Callable

PIPE_BYTES = 1 << 16


def full_disk() -> int:
    """ENOSPC."""
    return os.open("/dev/full", os.O_WRONLY)


def reader_gone() -> int:
    """EPIPE."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def terminal_gone() -> int:
    """EIO."""
    master, slave = pty.openpty()
    os.close(master)
    return slave


BROKEN: dict[str, Callable[[], int]] = {"full": full_disk, "reader gone": reader_gone, "terminal gone": terminal_gone}


def unread() -> tuple[int, int]:
    """A pipe so full that a write waits for a reader: its ends for reading and writing. The first line has no words."""
    reading, writing = os.pipe()
    os.write(writing, b"-" * (PIPE_BYTES - 1) + b"\n")
    return reading, writing
