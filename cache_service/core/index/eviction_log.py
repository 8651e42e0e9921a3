"""The blocks that left the index lately, when and why, for explanations of a miss.

Owns a digest of each node's whole prefix, and a ring of the digests of the last removed nodes. A digest is 8 bytes of a keyed
hash: two prefixes that share one could make an explanation wrong, never a hit, and the key is drawn anew for each pool so that
no client can search for such prefixes. Digests follow from tokens alone, because node numbers are used again. Everything here
is array work, once for all the blocks of a call.
"""

from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ..values.clock import Clock
from ..values.types import Int32Array, MatchEnd

UInt64Array = npt.NDArray[np.uint64]

CAPACITY = 65_536
_MASK = (1 << 64) - 1
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


class EvictionLog:
    """The digests of nodes and of removals. Roots are nodes too: they are negative, and so index the end of the array."""

    def __init__(self, num_nodes: int, max_roots: int, block_size: int, clock: Clock) -> None:
        self._block_size = block_size
        drawn = np.random.default_rng().integers(0, 1 << 64, block_size + 1, np.uint64) | np.uint64(1)
        self._factors, self._chain = drawn[1:], drawn[0]
        self._digest_of_node: UInt64Array = np.zeros(num_nodes + max_roots, np.uint64)
        self._ring: UInt64Array = np.zeros(CAPACITY, np.uint64)
        self._times = np.zeros(CAPACITY, np.float64)
        self._causes = np.zeros(CAPACITY, np.int8)
        self._next = 0
        self._clock = clock

    def add_root(self, root: int) -> None:
        self._digest_of_node[root] = -root * int(self._chain) & _MASK

    def add_each(self, nodes: Int32Array, parents: Int32Array, tokens: Int32Array) -> None:
        """nodes, parents [n]; tokens [n, block_size]. No node is the parent of another."""
        self._digest_of_node[nodes] = self._digest_of_node[parents] * self._chain + self._hash(tokens)

    def add_run(self, nodes: Int32Array, parent: int, tokens: Int32Array) -> None:
        """nodes [n], each the parent of the next; tokens [n * block_size]."""
        chain, digest = int(self._chain), int(self._digest_of_node[parent])
        hashes = self._hash(tokens.reshape(-1, self._block_size)).tolist()
        digests = accumulate(hashes, lambda above, own: (above * chain + own) & _MASK, initial=digest)
        next(digests)
        self._digest_of_node[nodes] = np.fromiter(digests, np.uint64, len(nodes))

    def remove(self, nodes: Int32Array, cause: MatchEnd) -> None:
        """These nodes left the index; of more nodes than the ring holds, the last ones are remembered."""
        removed = self._digest_of_node[nodes[-CAPACITY:]]
        start, end = self._next, self._next + len(removed)
        if end > CAPACITY:
            at = np.arange(start, end) % CAPACITY
            self._ring[at], self._times[at], self._causes[at] = removed, self._clock.now, cause
        else:
            self._ring[start:end] = removed
            self._times[start:end] = self._clock.now
            self._causes[start:end] = cause
        self._next = end % CAPACITY

    def last_end(self, parent: int, tokens: Int32Array) -> tuple[MatchEnd, float] | None:
        """Why and when a block of these tokens behind this parent was last removed; None where none is remembered."""
        digest = self._digest_of_node[[parent]] * self._chain + self._hash(tokens.reshape(1, -1))
        places = np.flatnonzero((self._ring == digest) & (self._causes > 0))
        if not len(places):
            return None
        last = places[np.argmax((places - self._next) % CAPACITY)]
        return MatchEnd(int(self._causes[last])), float(self._times[last])

    def _hash(self, tokens: Int32Array) -> UInt64Array:
        """[n] of [n, block_size]."""
        sums = tokens.astype(np.uint64) @ self._factors * _MIX
        return (sums ^ (sums >> _SHIFT)) * _MIX
