"""A queue of evictable blocks in arrays, and the stamps that tell its live entries from stale ones.

Becoming evictable appends (block, stamp); a block that was hit meanwhile, or released again, leaves a stale entry behind that
is skipped when it comes up. A linked list would make every hit and release of a long table a walk in Python; here each is one
array operation. Stale entries are swept when the arrays are full. Rule: the stamps of one queue increase.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from cache_service.types import Int32Array, Int64Array

IsEvictable = Callable[[Int32Array], npt.NDArray[np.bool_]]

_LEAST_LOOK = 64  # entries looked at in one go
_LEAST_ROOM = 16


class Stamps:
    """A number for each time that a block became evictable. An entry is live while it has its block's newest one."""

    def __init__(self, num_blocks: int, is_evictable: IsEvictable) -> None:
        self.clock = 0
        self.newest: Int64Array = np.zeros(num_blocks, np.int64)
        self._is_evictable = is_evictable

    def give(self, blocks: Int32Array) -> Int64Array:
        """[n] new stamps, in order."""
        stamps = np.arange(self.clock + 1, self.clock + len(blocks) + 1)
        self.clock += len(blocks)
        self.newest[blocks] = stamps
        return stamps

    def are_live(self, blocks: Int32Array, stamps: Int64Array) -> npt.NDArray[np.bool_]:
        return (self.newest[blocks] == stamps) & self._is_evictable(blocks)


class BlockQueue:
    """First in, first out; 12 bytes an entry, and at most twice as many entries as were ever live at once."""

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps
        self._blocks: Int32Array = np.zeros(_LEAST_ROOM, np.int32)
        self._entry_stamps: Int64Array = np.zeros(_LEAST_ROOM, np.int64)
        self._head = self._tail = 0

    def push(self, blocks: Int32Array, stamps: Int64Array) -> None:
        count = len(blocks)
        if self._tail + count > len(self._blocks):
            self._make_room(count)
        self._blocks[self._tail : self._tail + count] = blocks
        self._entry_stamps[self._tail : self._tail + count] = stamps
        self._tail += count

    def oldest(self) -> int | None:
        """The stamp of the first live entry; None when there is none."""
        while self._head < self._tail:
            end = min(self._tail, self._head + _LEAST_LOOK)
            live = self._live(self._head, end)
            if len(live):
                self._head += int(live[0])
                return int(self._entry_stamps[self._head])
            self._head = end
        return None

    def pop(self, count: int, until: int | None = None) -> Int32Array:
        """The first live blocks, at most count and with stamps up to `until`; fewer when there are no more."""
        end = self._tail
        if until is not None:
            end = self._head + int(np.searchsorted(self._entry_stamps[self._head : self._tail], until, "right"))
        popped: list[Int32Array] = []
        while count > 0 and self._head < end:
            stop = min(end, self._head + max(count, _LEAST_LOOK))
            live = self._live(self._head, stop)[:count]
            popped.append(self._blocks[self._head + live])
            count -= len(live)
            self._head = stop if count else self._head + int(live[-1]) + 1
        return np.concatenate(popped) if popped else np.empty(0, np.int32)

    def live(self) -> Int32Array:
        """All live blocks in order."""
        return self._blocks[self._head + self._live(self._head, self._tail)]

    def _live(self, start: int, end: int) -> Int64Array:
        return self._stamps.are_live(self._blocks[start:end], self._entry_stamps[start:end]).nonzero()[0]

    def _make_room(self, count: int) -> None:
        """Drops the stale entries; grows when more than half of the room stays taken."""
        live = self._head + self._live(self._head, self._tail)
        blocks, stamps = self._blocks[live], self._entry_stamps[live]
        room = len(self._blocks)
        while room < 2 * (len(live) + count):
            room *= 2
        if room > len(self._blocks):
            self._blocks, self._entry_stamps = np.zeros(room, np.int32), np.zeros(room, np.int64)
        self._blocks[: len(live)], self._entry_stamps[: len(live)] = blocks, stamps
        self._head, self._tail = 0, len(live)
