"""The past of each cached block: its number of uses, and a hash of its prefix by which it is recognised.

Uses are counted in batches, because counting a few costs as much as counting many: a fixed number of array operations, however
many sequences ended. Rule: a block has at least the uses of any block below it, so the unused blocks of a sequence are its last
ones.
"""

import numpy as np
import numpy.typing as npt

from ..values.types import Int32Array, Int64Array
from .ghosts import Ghosts, Traces, Uint8Array, Uint64Array
from .policy import Use

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MOST_UINT8 = 255
_NOTHING_FOUND = Traces(np.empty(0, np.uint8), np.empty(0, np.int64))

BoolArray = npt.NDArray[np.bool_]


class History:
    """uses [num_blocks]: 0 for a block that no ended sequence held, else at most max_uses; hashes, valid where uses > 0."""

    def __init__(self, num_blocks: int, max_uses: int) -> None:
        self._max_uses = max_uses
        self.most_in_batch = _MOST_UINT8 - max_uses  # sequences, so that a count fits while it is made
        self.uses: Uint8Array = np.zeros(num_blocks, np.uint8)
        self.hashes: Uint64Array = np.zeros(num_blocks, np.uint64)
        self._hasher = PrefixHasher()

    def record(self, batch: list[Use], ghosts: Ghosts, now: int) -> Traces:
        """Counts the uses of ended sequences, each with 1 block or more. Answers the traces of new blocks that were ghosts."""
        assert len(batch) <= self.most_in_batch, "a batch of more sequences than can be counted"
        blocks = np.concatenate([use.blocks for use in batch])
        lens = np.array([len(use.blocks) for use in batch])
        is_new = self.uses[blocks] == 0
        found = _NOTHING_FOUND
        if np.count_nonzero(is_new):
            new = self._hash(batch, blocks, lens, is_new)
            found = ghosts.pop(self.hashes[new], now)
            self.uses[new] = found.uses
        np.add.at(self.uses, blocks, np.uint8(1))
        # The most uses from the end of a sequence up to each block. Rows of earlier sequences are lifted above the later
        # ones, so that one accumulation from the end serves all sequences.
        lift = np.repeat(np.arange(len(lens), 0, -1) * (self._max_uses + 1), lens)
        uses = np.minimum(self.uses[blocks], self._max_uses) + lift
        uses = np.maximum.accumulate(uses[::-1])[::-1] - lift
        self.uses[blocks] = 0  # counts above the most allowed are dropped
        np.maximum.at(self.uses, blocks, uses.astype(np.uint8))
        return found

    def forget_blocks(self, blocks: Int32Array) -> None:
        self.uses[blocks] = 0

    def _hash(self, batch: list[Use], blocks: Int32Array, lens: Int64Array, is_new: BoolArray) -> Int32Array:
        """Hashes the prefixes that end with each unused block. Answers these blocks, each once."""
        block_size = len(batch[0].tokens) // len(batch[0].blocks)
        starts = np.cumsum(lens) - lens
        num_new = np.add.reduceat(is_new, starts, dtype=np.int64)
        num_known = lens - num_new
        before = np.array([self._hasher.root(use.root) for use in batch], np.uint64)
        above = num_known > 0
        before[above] = self.hashes[blocks[(starts + num_known)[above] - 1]]
        tokens = np.concatenate(
            [use.tokens[known * block_size :] for use, known in zip(batch, num_known.tolist(), strict=True)]
        )
        rows = is_new.nonzero()[0]
        new = blocks[rows]
        self.hashes[new] = self._hasher.prefixes(tokens, block_size, rows - np.repeat(starts, num_new), before, num_new)
        return new if len(batch) == 1 else np.unique(new)


class PrefixHasher:
    """Hashes of whole prefixes. It keeps the factors of places, roots and block sizes, which it needs again and again."""

    def __init__(self) -> None:
        self._places: Uint64Array = np.empty(0, np.uint64)
        self._factors: dict[int, Uint64Array] = {}
        self._roots: dict[int, int] = {}

    def prefixes(
        self, tokens: Int32Array, block_size: int, places: Int64Array, before: Uint64Array, lens: Int64Array
    ) -> Uint64Array:
        """[n] hashes of the prefixes that end with each block, for the blocks of several sequences, joined.

        tokens [n * block_size]; places [n] of the blocks in their sequences; before [m], the hashes of the prefixes in front
        of each sequence's blocks, or of its root; lens [m], the blocks of each. A hash is the sum of a hash for each block
        with its place, because sums over many blocks are one operation.
        """
        if block_size not in self._factors:
            self._factors[block_size] = np.arange(1, block_size + 1).astype(np.uint64) * _GOLDEN | np.uint64(1)
        most = int(places.max()) + 1
        if most > len(self._places):
            self._places = _mix(np.arange(1, 2 * most + 1).astype(np.uint64))
        words = tokens.reshape(-1, block_size).astype(np.uint64) @ self._factors[block_size]
        sums = np.cumsum(_mix(words ^ self._places[places]), dtype=np.uint64)
        ends = np.cumsum(lens)
        starts = ends - lens
        return sums + np.repeat(before - np.where(starts > 0, sums[starts - 1], np.uint64(0)), lens)

    def root(self, root: int) -> int:
        """The hash with which the prefixes of a tenant's tree start."""
        if root not in self._roots:
            self._roots[root] = int(_mix(np.array([root]).astype(np.uint64))[0])
        return self._roots[root]


def _mix(values: Uint64Array) -> Uint64Array:
    """The finalizer of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
