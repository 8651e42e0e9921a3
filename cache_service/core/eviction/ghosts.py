"""Traces of evicted blocks: enough to recognise a block that comes back, with the number and time of its uses.

A block is recognised by a hash of its whole prefix, not by its block number. The table has no chains: a new entry replaces the
entry at its place, which makes every operation one array operation. A few entries are lost early; that does not harm a
statistic that knows how long each block was watched.

An entry is 4 bytes: 13 bits of the hash, 4 of uses, 15 of the time in units of 1/256 of a turnover, which is finer than the
half octaves in which ages are counted. A false match, one in 8192 looks at an occupied place, misleads a guess about the
future, never a look-up.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..values.types import Int64Array

Uint8Array = npt.NDArray[np.uint8]
Uint32Array = npt.NDArray[np.uint32]
Uint64Array = npt.NDArray[np.uint64]

_LEAST_ENTRIES = 1024
_UNITS_PER_TURNOVER = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_TAGS = np.uint32(0x1FFF)  # bits of the hash; above them 4 bits of uses, then the time
_USES_SHIFT, _USES_MASK = np.uint32(13), np.uint32(0xF)
_TIME_SHIFT, _TIME_MASK = np.uint32(17), 0x7FFF


class Traces(NamedTuple):
    """The history of n blocks: uses [n], 0 for an unknown block, and stamps [n] of when each last became evictable."""

    uses: Uint8Array
    stamps: Int64Array


class Ghosts:
    """The table of traces. Times wrap after 128 turnovers; entries older than that were overwritten long before."""

    def __init__(self, num_blocks: int, num_entries: int) -> None:
        self._entries: Uint32Array = np.zeros(max(num_entries, _LEAST_ENTRIES), np.uint32)
        self._size = np.uint64(len(self._entries))
        self._unit = max(1, num_blocks // _UNITS_PER_TURNOVER)

    def remember(self, hashes: Uint64Array, uses: Uint8Array, stamps: Int64Array, now: int) -> Traces:
        """Remembers evicted blocks. Answers the traces that they replace."""
        tags, at = self._places(hashes)
        lost = self._traces(self._entries[at], now)
        times = ((stamps // self._unit) & _TIME_MASK).astype(np.uint32)
        self._entries[at] = tags | (uses.astype(np.uint32) << _USES_SHIFT) | (times << _TIME_SHIFT)
        return lost

    def pop(self, hashes: Uint64Array, now: int) -> Traces:
        """Takes out the traces of these blocks, which are cached again."""
        tags, at = self._places(hashes)
        entries = self._entries[at]
        known = (entries & _TAGS) == tags
        self._entries[at[known]] = 0
        return self._traces(np.where(known, entries, np.uint32(0)), now)

    def sample(self, first: int, every: int, now: int) -> Traces:
        """Each `every`-th entry from the first on."""
        return self._traces(self._entries[first::every], now)

    def _places(self, hashes: Uint64Array) -> tuple[Uint32Array, Int64Array]:
        mixed = hashes * _GOLDEN
        places = ((mixed >> _HALF) * self._size) >> _HALF
        return mixed.astype(np.uint32) & _TAGS, places.astype(np.int64)

    def _traces(self, entries: Uint32Array, now: int) -> Traces:
        uses = ((entries >> _USES_SHIFT) & _USES_MASK).astype(np.uint8)
        ages = (now // self._unit - (entries >> _TIME_SHIFT).astype(np.int64)) & _TIME_MASK
        return Traces(uses, now - ages * self._unit)
