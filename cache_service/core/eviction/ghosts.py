"""Traces of evicted blocks: enough to recognise a block that comes back, with its class, its turn and the time of its last use.

A block is recognised by a hash of its whole prefix, not by its block number. The table has no chains: a new entry has two
places and replaces the older entry of the two, which makes every operation a few array operations. A few entries are lost
early; that does not harm a statistic that knows how long each block was watched.

A block should be remembered for several turnovers, because in a small cache most reuses come long after the eviction. In a
large pool only one block in up to eight, chosen by its hash, leaves a trace: that is enough for a statistic, and of a prefix
that comes back a few blocks are recognised all the same.

An entry is 4 bytes: 11 bits of the hash, so that one new block in two thousand is mistaken for an old one; 7 of the class, 2 of
the turn, and 12 of the time in units of 1/256 of a turnover, which is finer than the half octaves in which ages are counted.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..values.types import Int64Array

Uint8Array = npt.NDArray[np.uint8]
Uint32Array = npt.NDArray[np.uint32]
Uint64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]

_LEAST_ENTRIES = 1024
_TURNOVERS = 7  # that a trace lasts, about
_MOST_EVERY = 8
_WHOLE_BELOW = 1 << 15  # blocks of a pool in which each evicted block leaves a trace
UNITS_PER_TURNOVER = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_NUM_TAGS = np.uint64(2047)  # from 1 on: an empty entry is 0
_TAG_MASK = np.uint32(0x7FF)
_CLASS_SHIFT, _CLASS_MASK = np.uint32(11), np.uint32(0x7F)
_TURN_SHIFT, _TURN_MASK = np.uint32(18), np.uint32(0x3)
_TIME_SHIFT, _TIME_MASK = np.uint32(20), 0xFFF
MOST_TURNS = 4  # that a trace has room for


class Traces(NamedTuple):
    """The past of n blocks: classes [n], turns [n], 0 for an unknown block, and stamps [n] of when each last began to wait."""

    classes: Uint8Array
    turns: Uint8Array
    stamps: Int64Array

    def where(self, chosen: BoolArray) -> "Traces":
        return Traces(self.classes[chosen], self.turns[chosen], self.stamps[chosen])


class Ghosts:
    """The table of traces."""

    def __init__(self, num_blocks: int) -> None:
        self.every = min(_MOST_EVERY, max(1, num_blocks // _WHOLE_BELOW))  # one block in so many leaves a trace
        num_entries = max(_TURNOVERS * num_blocks // self.every // 2 * 2, _LEAST_ENTRIES)
        # Written now: memory that is touched first at random places would hold up the first evictions for 50 ms.
        self._entries: Uint32Array = np.full(num_entries, 0, np.uint32)
        self._size = np.uint64(num_entries)
        self._unit = max(1, num_blocks // UNITS_PER_TURNOVER)

    def remember(self, hashes: Uint64Array, blocks: Traces, now: int) -> Traces:
        """Remembers evicted blocks. Returns the traces that they replace."""
        mixed = hashes * _GOLDEN
        if self.every > 1:
            chosen = self._leave_traces(mixed)
            mixed, blocks = mixed[chosen], blocks.where(chosen)
        tags, at = self._places(mixed)
        at = np.where(self._ages(self._entries[at], now) >= self._ages(self._entries[at ^ 1], now), at, at ^ 1)
        lost = self._traces(self._entries[at], now)
        times = ((blocks.stamps // self._unit) & _TIME_MASK).astype(np.uint32)
        classes, turns = blocks.classes.astype(np.uint32), (blocks.turns - 1).astype(np.uint32)
        self._entries[at] = tags | (classes << _CLASS_SHIFT) | (turns << _TURN_SHIFT) | (times << _TIME_SHIFT)
        return lost

    def pop(self, hashes: Uint64Array, now: int) -> Traces:
        """Takes out the traces of these blocks, which are cached again. A block without one has the turn 0."""
        tags, at = self._places(hashes * _GOLDEN)
        at = np.where((self._entries[at] & _TAG_MASK) == tags, at, at ^ 1)
        entries = self._entries[at]
        known = (entries & _TAG_MASK) == tags
        self._entries[at[known]] = 0
        return self._traces(np.where(known, entries, np.uint32(0)), now)

    def sample(self, first: int, every: int, now: int) -> Traces:
        """Each `every`-th entry from the first on."""
        return self._traces(self._entries[first::every], now)

    def _leave_traces(self, mixed: Uint64Array) -> BoolArray:
        return (mixed >> np.uint64(16)) % np.uint64(self.every) == 0

    def _places(self, mixed: Uint64Array) -> tuple[Uint32Array, Int64Array]:
        places = ((mixed >> _HALF) * self._size) >> _HALF
        tags = (mixed & np.uint64(0xFFFF)) % _NUM_TAGS + np.uint64(1)
        return tags.astype(np.uint32), places.astype(np.int64)

    def _traces(self, entries: Uint32Array, now: int) -> Traces:
        classes = ((entries >> _CLASS_SHIFT) & _CLASS_MASK).astype(np.uint8)
        turns = np.where(entries > 0, ((entries >> _TURN_SHIFT) & _TURN_MASK) + np.uint32(1), 0).astype(np.uint8)
        return Traces(classes, turns, now - self._ages(entries, now) * self._unit)

    def _ages(self, entries: Uint32Array, now: int) -> Int64Array:
        """In units; more than any for an empty entry."""
        ages = (now // self._unit - (entries >> _TIME_SHIFT).astype(np.int64)) & _TIME_MASK
        return np.where(entries > 0, ages, _TIME_MASK + 1)
