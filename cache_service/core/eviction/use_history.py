"""The past of each cached block: its uses, its turn, its class, and a hash of its prefix by which it is recognised.

The turn of a block is 1 for those of a prompt of which nothing was known, and one more than that of the block above for those
that a later request brought. The class says what blocks that fare alike have in common: how often they were used, in which
turn the last request was that used them, how many blocks that one brought (in octaves of octaves), and whether they were its
last. Uses are counted in batches, because counting a few costs as much as counting many. Rule: a block whose past is known has
ancestors whose past is known, so the unknown blocks of a sequence are its last ones.
"""

import numpy as np
import numpy.typing as npt

from ..values.distinct import distinct
from ..values.types import Int32Array, Int64Array
from .ghosts import MOST_TURNS, Ghosts, Traces, Uint8Array, Uint64Array
from .policy import Use

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NOTHING_FOUND = Traces(np.empty(0, np.uint8), np.empty(0, np.uint8), np.empty(0, np.int64))

MOST_USES = 4
_NUM_TURNS, _NUM_SIZES = MOST_TURNS, 4  # of classes; sizes: up to 1 block, 7, 31, more
CLASSES_PER_USE = 2 * _NUM_TURNS * _NUM_SIZES
NUM_CLASSES = MOST_USES * CLASSES_PER_USE
MOST_IN_BATCH = 255 - MOST_USES  # sequences, so that a count fits while it is made

BoolArray = npt.NDArray[np.bool_]


class History:
    """Arrays over block ids. turns: 0 for a block that no ended sequence held; the others are valid where it is not 0."""

    def __init__(self, num_blocks: int) -> None:
        self.uses: Uint8Array = np.zeros(num_blocks, np.uint8)  # up to MOST_USES
        self.turns: Uint8Array = np.zeros(num_blocks, np.uint8)  # up to MOST_TURNS
        self.classes: Uint8Array = np.zeros(num_blocks, np.uint8)
        self.hashes: Uint64Array = np.zeros(num_blocks, np.uint64)
        self.are_beside: BoolArray = np.zeros(num_blocks, np.bool_)  # they share the past of another block, and leave no ghost
        self._hasher = PrefixHasher()

    def record(self, batch: list[Use], ghosts: Ghosts, now: int) -> Traces:
        """Counts the uses of ended sequences, each with 1 block or more. Returns the traces of new blocks that were ghosts."""
        assert len(batch) <= MOST_IN_BATCH, "a batch of more sequences than can be counted"
        blocks = np.concatenate([use.blocks for use in batch])
        lens = np.array([len(use.blocks) for use in batch])
        is_new = self.turns[blocks] == 0
        found = _NOTHING_FOUND
        if np.count_nonzero(is_new):
            new = self._hash(batch, blocks, lens, is_new)
            found = ghosts.pop(self.hashes[new], now)
            self.turns[new] = found.turns
            self.uses[new] = found.classes // CLASSES_PER_USE + (found.turns > 0)
            found = found.where(found.turns > 0)
        np.add.at(self.uses, blocks, np.uint8(1))
        self.uses[blocks] = np.minimum(self.uses[blocks], MOST_USES)
        self._classify(blocks, lens)
        for use in batch:
            if len(use.beside):
                self.are_beside[use.beside] = True
                for column in (self.turns, self.uses, self.classes):
                    column[use.beside] = column[use.blocks[use.places]]
        return found

    def forget_blocks(self, blocks: Int32Array) -> None:
        self.turns[blocks] = 0
        self.uses[blocks] = 0
        self.are_beside[blocks] = False

    def traces(self, blocks: Int32Array, stamps: Int64Array) -> Traces:
        return Traces(self.classes[blocks], self.turns[blocks], stamps)

    def _classify(self, blocks: Int32Array, lens: Int64Array) -> None:
        """Gives the blocks of each sequence their class, and those that it brought their turn."""
        start = 0
        sizes, turns = np.zeros(len(lens), np.int64), np.zeros(len(lens), np.int64)
        for row, length in enumerate(lens.tolist()):
            path = blocks[start : start + length]
            known = self.turns[path].nonzero()[0]
            num_known = int(known[-1]) + 1 if len(known) else 0
            turn = min(int(self.turns[path[num_known - 1]]) + 1, MOST_TURNS) if num_known else 1
            above, brought = path[:num_known], path[num_known:]
            self.turns[brought] = turn
            if len(known) < num_known:  # only some ghosts leave a trace
                missed = above[self.turns[above] == 0]
                self.turns[missed], self.uses[missed] = turn - 1, np.maximum(self.uses[missed], self.uses[above[-1]])
            turns[row], sizes[row] = turn, min(len(brought).bit_length() // 2, _NUM_SIZES - 1)
            start += length
        kinds = (turns - 1) * _NUM_SIZES + sizes
        classes = np.repeat(2 * kinds, lens)
        classes[np.cumsum(lens) - 1] += 1
        self.classes[blocks] = (self.uses[blocks] - 1) * CLASSES_PER_USE + classes

    def _hash(self, batch: list[Use], blocks: Int32Array, lens: Int64Array, is_new: BoolArray) -> Int32Array:
        """Hashes the prefixes that end with each unused block. Returns these blocks, each once."""
        block_size = len(batch[0].tokens) // len(batch[0].blocks)
        starts = np.cumsum(lens) - lens
        num_new = np.add.reduceat(is_new, starts, dtype=np.int64)
        num_known = lens - num_new
        before = _mix(np.array([use.root for use in batch], np.int64).view(np.uint64))
        above = num_known > 0
        before[above] = self.hashes[blocks[(starts + num_known)[above] - 1]]
        tokens = np.concatenate(
            [use.tokens[known * block_size :] for use, known in zip(batch, num_known.tolist(), strict=True)]
        )
        rows = is_new.nonzero()[0]
        new = blocks[rows]
        self.hashes[new] = self._hasher.prefixes(tokens, block_size, rows - np.repeat(starts, num_new), before, num_new)
        return new if len(batch) == 1 else distinct(new)


class PrefixHasher:
    """Hashes of whole prefixes. It keeps the factors of places and block sizes, which it needs again and again."""

    def __init__(self) -> None:
        self._places: Uint64Array = np.empty(0, np.uint64)
        self._factors: dict[int, Uint64Array] = {}

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


def _mix(values: Uint64Array) -> Uint64Array:
    """The finalizer of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
