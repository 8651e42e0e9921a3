"""What a service with failpoints and the test that breaks it share: how often each point was passed, and which is armed.

A file that both map, so that the counts outlive a killed process. One point at a time is armed; it fires once, when it has
been passed the given number of times. A lock of the file decides between one that fires and one that is disarmed.
"""

import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

import numpy as np

_ARMED = struct.Struct("<iiid")  # point or -1, passes before it fires, Action, seconds
_COUNTS_AT = 64


class Action(IntEnum):
    """What becomes of the process. DELAY: of the call alone where the point is at an await."""

    NOTHING = 0
    KILL = 1
    STOP = 2
    DELAY = 3


@dataclass(frozen=True, slots=True)
class Armed:
    """An armed point. num_passes: how often it is passed unharmed. seconds: of a delay."""

    point: int
    action: Action
    num_passes: int = 0
    seconds: float = 0.0


_NONE = Armed(-1, Action.NOTHING)


class Board:
    """An open file of the board."""

    def __init__(self, path: Path, num_points: int | None = None) -> None:
        """num_points: of a new board; an existing one is opened without."""
        if num_points is not None:
            path.write_bytes(bytes(_COUNTS_AT + 4 * num_points))
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._map = mmap.mmap(self._descriptor, 0)
        self.counts = np.frombuffer(self._map, np.uint32, offset=_COUNTS_AT)  # [num_points] passes
        if num_points is not None:
            self.disarm()

    def passed_points(self) -> list[int]:
        """Those that were passed by now."""
        passed: list[int] = np.flatnonzero(self.counts.copy()).tolist()
        return passed

    def arm(self, armed: Armed) -> None:
        with self._locked():
            self._write(armed)

    def disarm(self) -> bool:
        """Whether a point was armed that had not fired yet."""
        with self._locked():
            was_armed = self._read().point >= 0
            self._write(_NONE)
            return was_armed

    def passed(self, point: int) -> Armed | None:
        """The point is passed now. What is to be done there, if anything; that is told once."""
        self.counts[point] += 1
        if self._read().point != point:
            return None
        with self._locked():
            armed = self._read()
            if armed.point != point:
                return None
            if armed.num_passes > 0:
                self._write(replace(armed, num_passes=armed.num_passes - 1))
                return None
            self._write(_NONE)
            return armed

    def _read(self) -> Armed:
        point, num_passes, action, seconds = _ARMED.unpack_from(self._map)
        return Armed(point, Action(action), num_passes, seconds)

    def _write(self, armed: Armed) -> None:
        _ARMED.pack_into(self._map, 0, armed.point, armed.num_passes, armed.action, armed.seconds)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
