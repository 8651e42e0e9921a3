"""Locks that the kernel drops by itself: of a folder's one service, and of every process that maps a file.

A lock on an open file description lasts as long as anything refers to the description: a descriptor, a copy of it that was sent
to another process, or a mapping made with it, also in forked children. So `is_held_by_others` returns whether a process of an
earlier run may still write a file that this run has opened anew, and a killed process needs no sweep.
"""

import fcntl
import os
import struct
from pathlib import Path
from typing import NamedTuple

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


_OWNER, _KEEPER = 0, 1  # bytes of a folder's lock file, locked for the process: it has the folder; it keeps what is there


class FolderInUse(Exception):
    """Another service has the folder."""


class FolderOwner(NamedTuple):
    """The process that has a folder. keeps: it leaves what is in the folder when it stops."""

    pid: int
    keeps: bool


def lock_folder(path: Path, *, keep: bool) -> int:
    """A descriptor that keeps the folder for this process until it is closed. Raises FolderInUse, OSError.

    keep: see FolderOwner.
    """
    while True:
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path / "lock")):
                for byte in (_OWNER, _KEEPER) if keep else (_OWNER,):
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)  # of the process: the kernel shows its pid
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise FolderInUse("another cache service keeps its memory there") from None
        except FileNotFoundError:
            pass
        os.close(descriptor)  # its owner removed it between this open and this lock: take the new file


def folder_owner(path: Path) -> FolderOwner | None:
    """The process that has locked the folder; None where none has, or one that this process cannot see. Raises OSError.

    The kernel names it, so the answer is right at that moment; a process of another PID namespace has no number here.
    """
    try:
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        pid, keeper = (_locked_by(descriptor, byte) for byte in (_OWNER, _KEEPER))
    finally:
        os.close(descriptor)
    return FolderOwner(pid, keeper == pid) if pid > 0 else None


def _locked_by(descriptor: int, byte: int) -> int:
    """The process that has locked a byte for itself; 0 where none has."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else int(pid)


def hold(descriptor: int) -> None:
    """From now on `is_held_by_others` is true of the file elsewhere, until nothing refers to this description any more."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))


def is_held_by_others(descriptor: int) -> bool:
    """Whether another description of the same file is held, or was by a process that may still have the file mapped."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    found: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
    return found != fcntl.F_UNLCK
