"""Traces of evicted blocks: enough to know one again when it comes back, and how often and when it was used.

A block is known by a hash of its whole prefix, so that it is found whatever block number it gets next. A table without
chains: a newcomer takes the place of whoever is there. That loses some early, which is no harm to a statistic that knows how
long each was watched, and makes every operation one array operation. 9 bytes an entry. A false match (2^-32) misleads a
guess about the future, never a look-up.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_service.types import Int32Array, Int64Array

Uint8Array = npt.NDArray[np.uint8]
Uint64Array = npt.NDArray[np.uint64]

_LEAST_ENTRIES = 1024
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Traces(NamedTuple):
    """[n] uses, 0 where nothing is known; [n] stamps of when each became evictable for the last time."""

    uses: Uint8Array
    stamps: Int64Array


class Ghosts:
    """Times are low 32 bits of stamps: what is older than that was overwritten long ago."""

    def __init__(self, num_entries: int) -> None:
        self._size = np.uint64(max(num_entries, _LEAST_ENTRIES))
        size = int(self._size)
        self._keys: npt.NDArray[np.uint32] = np.zeros(size, np.uint32)
        self._stamps: npt.NDArray[np.uint32] = np.zeros(size, np.uint32)
        self._uses: Uint8Array = np.zeros(size, np.uint8)

    def put(self, hashes: Uint64Array, uses: Uint8Array, stamps: Int64Array, now: int) -> Traces:
        """Remembers evicted blocks. Answers those that are forgotten for them."""
        keys, at = self._places(hashes)
        lost = Traces(self._uses[at], self._full(self._stamps[at], now))
        self._keys[at], self._uses[at], self._stamps[at] = keys, uses, stamps.astype(np.uint32)
        return lost

    def pop(self, hashes: Uint64Array, now: int) -> Traces:
        """What is remembered of these blocks, which are cached again."""
        keys, at = self._places(hashes)
        known = self._keys[at] == keys
        found = Traces(np.where(known, self._uses[at], np.uint8(0)), self._full(self._stamps[at], now))
        self._uses[at[known]] = 0
        self._keys[at[known]] = 0
        return found

    def sample(self, first: int, every: int, now: int) -> Traces:
        """Every so many entries."""
        return Traces(self._uses[first::every], self._full(self._stamps[first::every], now))

    def _places(self, hashes: Uint64Array) -> tuple[npt.NDArray[np.uint32], Int64Array]:
        mixed = hashes * _GOLDEN
        places = ((mixed >> np.uint64(32)) * self._size) >> np.uint64(32)
        return mixed.astype(np.uint32) | np.uint32(1), places.astype(np.int64)

    @staticmethod
    def _full(stamps: npt.NDArray[np.uint32], now: int) -> Int64Array:
        return now - ((np.int64(now) - stamps.astype(np.int64)) & np.int64(0xFFFFFFFF))


def prefix_hashes(tokens: Int32Array, block_size: int, first: int, before: int) -> Uint64Array:
    """[n] hashes of the prefixes that end with each block.

    tokens [n * block_size] of the blocks from index `first` of the sequence on; before: the hash of the prefix in front of
    them, or of the root. A sum of hashes of each block with its place, because sums of a thousand blocks are one operation.
    """
    words = tokens.reshape(-1, block_size).astype(np.uint64)
    factors = (np.arange(1, block_size + 1).astype(np.uint64) * _GOLDEN) | np.uint64(1)
    places = np.arange(first + 1, first + len(words) + 1).astype(np.uint64)
    return np.uint64(before) + np.cumsum(_mix((words * factors).sum(1, dtype=np.uint64) ^ _mix(places)), dtype=np.uint64)


def root_hash(root: int) -> int:
    """Where the prefixes of a tenant's tree start."""
    return int(_mix(np.array([root]).astype(np.uint64))[0])


def _mix(values: Uint64Array) -> Uint64Array:
    """The finalizer of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
