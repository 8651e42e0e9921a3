"""The blocks that left the index lately: when, why, and for whose need. For explanations and counts of what is missed.

Owns a digest of each node's whole prefix, and a table of the digests of the last removed nodes. A digest is 8 bytes of a keyed
hash: two prefixes that share one could make an explanation wrong, never a hit, and the key is drawn anew for each pool so that
no client can search for such prefixes. Digests follow from tokens alone, because node numbers are used again. Everything here
is array work, once for all the blocks of a call.

The table has sets of eight; the digest says which, and the oldest of a set makes room. So nearly all of the last 32,000 removed
blocks are remembered, and half of the last 65,000, in 1 MB, and a look at many of them costs a few array operations. Of a block
that comes and goes the last two times are.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..values.clock import Clock
from ..values.types import NO_TENANT, Int32Array, Int64Array, MatchEnd

UInt64Array = npt.NDArray[np.uint64]

CAPACITY = 65_536  # a power of two
WAYS = 8
_MASK = (1 << 64) - 1
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)
_TAG_SHIFT, _SET_SHIFT = np.uint64(32), np.uint64(16)
_TICKS = 64  # a second
_MOST_NOTED = 64  # calls
_LEAST_POWERS = 64
_MOST_OF_ONE = 2  # ways that the removals of one block take


class Removals(NamedTuple):
    """The last removal of each of n blocks. causes [n]: of MatchEnd, 0 where none is remembered.

    needs [n]: the tenant for which it was evicted, or NO_TENANT. ages [n]: nodes removed since. ticks [n]: when.
    """

    causes: npt.NDArray[np.int8]
    needs: Int32Array
    ages: Int64Array
    ticks: npt.NDArray[np.uint32]


class EvictionLog:
    """The digests of nodes and of removals. Roots are nodes too: they are negative, and so index the end of the array."""

    def __init__(self, num_nodes: int, max_roots: int, block_size: int, clock: Clock) -> None:
        self._block_size = block_size
        drawn = np.random.default_rng().integers(0, 1 << 64, block_size + 1, np.uint64) | np.uint64(1)
        self._factors, self._chain = drawn[1:], drawn[0]
        self._powers = _powers(int(self._chain), _LEAST_POWERS)  # from the first one on
        self._inverses = _powers(pow(int(self._chain), -1, 1 << 64), _LEAST_POWERS)
        self._digest_of_node: UInt64Array = np.zeros(num_nodes + max_roots, np.uint64)
        shape = CAPACITY // WAYS, WAYS
        self._tags = np.zeros(shape, np.uint32)
        self._ticks = np.zeros(shape, np.uint32)
        self._numbers = np.zeros(shape, np.uint32)  # of removals, counted from 0 again after 2^32
        self._needs = np.zeros(shape, np.uint16)  # -tenant
        self._causes = np.zeros(shape, np.int8)
        self._cursors = np.zeros(len(self._tags), np.uint8)  # the way that is used next, beyond a multiple of WAYS
        self._noted: list[tuple[UInt64Array, MatchEnd, Int32Array, int]] = []  # digests, cause, needs, time: not in it yet
        self._clock = clock
        self.num_removed = 0
        self.needed_by: Int32Array | int = NO_TENANT  # [n] or one: tenants that get the blocks evicted from now on

    def add_root(self, root: int, seed: int) -> None:
        """seed: of the root's scope; a scope that comes back finds what left the index before."""
        self._digest_of_node[root] = seed * int(self._chain) & _MASK

    def add_each(self, nodes: Int32Array, parents: Int32Array, tokens: Int32Array) -> None:
        """nodes, parents [n]; tokens [n, block_size]. No node is the parent of another."""
        self._digest_of_node[nodes] = self._digest_of_node[parents] * self._chain + self._hash(tokens)

    def add_run(self, nodes: Int32Array, parent: int, tokens: Int32Array) -> None:
        """nodes [n], each the parent of the next; tokens [n * block_size]."""
        self._digest_of_node[nodes] = self.digests(self.digest(parent), tokens)

    def digest(self, node: int) -> int:
        """The digest of a node or a root."""
        return int(self._digest_of_node[node])

    def get_digests(self, nodes: Int32Array) -> UInt64Array:
        """[n] the digests of these nodes."""
        return self._digest_of_node[nodes]

    def digests(self, above: int, tokens: Int32Array) -> UInt64Array:
        """[n] of blocks of which each is the parent of the next. above: of the first one's parent. tokens [n * block_size]."""
        hashes = self._hash(tokens.reshape(-1, self._block_size))
        if len(hashes) > len(self._powers):
            self._powers, self._inverses = (_powers(int(each[0]), 2 * len(hashes)) for each in (self._powers, self._inverses))
        # A digest is the one above times the chain's number, and the block's hash. Over the powers of that number, which is odd
        # and so has an inverse, these are sums.
        powers = self._powers[: len(hashes)]
        return powers * (np.uint64(above) + np.cumsum(hashes * self._inverses[: len(hashes)], dtype=np.uint64))

    def remove(self, nodes: Int32Array, cause: MatchEnd) -> None:
        """These distinct nodes left the index; of more nodes than the table holds, the last ones are remembered."""
        needed_by = self.needed_by if cause is MatchEnd.EVICTED else NO_TENANT
        self._noted.append((self._digest_of_node[nodes], cause, np.atleast_1d(needed_by), self._now))
        self.num_removed += len(nodes)
        if len(self._noted) == _MOST_NOTED:
            self._settle()

    def _settle(self) -> None:
        """Puts what was noted into the table: of a few nodes and of many that costs about the same.

        A block has two ways at most. A further removal of it takes the older one, so that no other block of its set makes room.
        """
        noted, self._noted = self._noted, []
        counts = [len(digests) for digests, *_ in noted]
        every, count = np.concatenate([digests for digests, *_ in noted]), sum(counts)
        kept, nth, num_each = _last_of_each(every)
        digests, numbers = every[kept], (self.num_removed - count + 1 + kept) & 0xFFFF_FFFF
        sets, tags = self._sets(digests), (digests >> _TAG_SHIFT).astype(np.uint32)
        is_own = (self._tags[sets] == tags[:, None]) & (self._causes[sets] > 0)
        num_replaced = is_own.sum(axis=1) + num_each - _MOST_OF_ONE
        by_age = np.where(is_own, -self._ages(sets), 1).argsort(axis=1, kind="stable")  # its own first, and of them the oldest
        ways = by_age[np.arange(len(kept)), nth]
        fresh = (nth >= num_replaced).nonzero()[0]
        fresh = fresh[sets[fresh].argsort(kind="stable")]
        own_sets = sets[fresh]
        ways[fresh] = self._cursors[own_sets] + np.arange(len(fresh)) - np.searchsorted(own_sets, own_sets)
        self._cursors[own_sets] = (ways[fresh] + 1) & 0xFF
        at = sets, ways % WAYS
        needs = [of[np.arange(number) % max(len(of), 1)] for number, (_, _, of, _) in zip(counts, noted, strict=True)]
        self._tags[at], self._numbers[at] = tags, numbers
        self._needs[at] = -np.concatenate(needs)[kept] & 0xFFFF
        self._causes[at] = np.repeat([cause for _, cause, _, _ in noted], counts)[kept]
        self._ticks[at] = np.repeat([ticks for *_, ticks in noted], counts)[kept]

    def find(self, digests: UInt64Array, since: Int64Array) -> Removals:
        """The last removals of these blocks [n], but for those of the last since [n] nodes."""
        if self._noted:
            self._settle()
        sets = self._sets(digests)
        is_it = (self._tags[sets] == (digests >> _TAG_SHIFT).astype(np.uint32)[:, None]) & (self._causes[sets] > 0)
        ages = self._ages(sets)
        ages[~is_it | (ages < since[:, None])] = _MASK >> 1
        way = ages.argmin(axis=1)
        at = sets, way
        ages = ages[np.arange(len(way)), way]
        causes = np.where(ages < _MASK >> 1, self._causes[at], np.int8(0))
        return Removals(causes, -self._needs[at].astype(np.int32), ages, self._ticks[at])

    def last_end(self, parent: int, tokens: Int32Array) -> tuple[MatchEnd, float] | None:
        """Why, and how many seconds ago, a block of these tokens behind this parent was removed; None where it is not known."""
        digests = self.digests(self.digest(parent), tokens)
        last = self.find(digests, np.zeros(1, np.int64))
        if not last.causes[0]:
            return None
        return MatchEnd(int(last.causes[0])), ((self._now - int(last.ticks[0])) & 0xFFFF_FFFF) / _TICKS

    @property
    def _now(self) -> int:
        return int(self._clock.now * _TICKS) & 0xFFFF_FFFF

    def _ages(self, sets: Int64Array) -> Int64Array:
        """[n, WAYS] nodes removed since."""
        return (np.uint32(self.num_removed & 0xFFFF_FFFF) - self._numbers[sets]).astype(np.int64)

    def _sets(self, digests: UInt64Array) -> Int64Array:
        return ((digests >> _SET_SHIFT) % np.uint64(len(self._tags))).astype(np.int64)

    def _hash(self, tokens: Int32Array) -> UInt64Array:
        """[n] of [n, block_size]."""
        sums = tokens.astype(np.uint64) @ self._factors * _MIX
        return (sums ^ (sums >> _SHIFT)) * _MIX


def _last_of_each(digests: UInt64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The places of the last removals of each block, ascending; how many of them are before each, and how many there are."""
    order = digests.argsort(kind="stable")
    alike = digests[order]
    starts = np.concatenate(([True], alike[1:] != alike[:-1])).nonzero()[0]
    num_each = np.diff(starts, append=len(digests))
    kept_each = np.minimum(num_each, _MOST_OF_ONE)
    nth = np.arange(len(digests)) - np.repeat(starts + num_each - kept_each, num_each)
    is_kept = nth >= 0
    kept, nth, kept_each = order[is_kept], nth[is_kept], np.repeat(kept_each, num_each)[is_kept]
    in_time = kept.argsort(kind="stable")
    return kept[in_time], nth[in_time], kept_each[in_time]


def _powers(number: int, count: int) -> UInt64Array:
    """[count] powers from the first one on, modulo 2^64."""
    return np.cumprod(np.full(count, number, np.uint64), dtype=np.uint64)
