"""The rows of one tier of a kept index: one per block, each with a check over all that it says.

Owns the form of a row and of its check. Rules: a row is stored before its check, so a row that was being stored when its
process was killed has none; a block's row is forgotten by one store, of 0 into its check; a row whose check does not fit says
nothing. The check covers the block's number and the memory's key, so a row in another place, or of other memory, says nothing
either. Knows no tree: the names of nodes are plain numbers here. Beside it a row has the number of the block's group of layers.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..values.kept_index import KeptTable, UInt64Array, row_words
from ..values.types import Int32Array, Int64Array

_GROUP_BITS = 56  # of a name; above them stands the number of the group of layers
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Slots:
    """What rows say of n blocks of one tier: names [n] and parents [n] of nodes, tokens [n, block_size].

    A negative parent is a root. digests [n]: of what the blocks hold; 0 where none was made. groups [n]: of layers; None: all
    are of the first.
    """

    blocks: Int32Array
    names: Int64Array
    parents: Int64Array
    tokens: Int32Array
    digests: UInt64Array
    groups: npt.NDArray[np.int8] | None = None

    def __len__(self) -> int:
        return len(self.blocks)

    def at(self, places: Int64Array) -> "Slots":
        """Those at these places, in their order."""
        blocks, names, parents = self.blocks[places], self.names[places], self.parents[places]
        groups = self.groups[places] if self.groups is not None else None
        return Slots(blocks, names, parents, self.tokens[places], self.digests[places], groups)

    def of_group(self, group: int) -> "Slots":
        """Those of one group of layers."""
        is_of_first = group == 0 and self.groups is None
        return self if is_of_first else self.at(np.flatnonzero(self._group_numbers == group))

    @property
    def num_groups(self) -> int:
        """Groups up to the last one that a row names."""
        return int(self._group_numbers.max(initial=0)) + 1

    @property
    def _group_numbers(self) -> npt.NDArray[np.int8]:
        return np.zeros(len(self), np.int8) if self.groups is None else self.groups

    def of_blocks(self, blocks: Int32Array) -> "Slots":
        """Those of these blocks."""
        return self.at(np.flatnonzero(np.isin(self.blocks, blocks)))

    def without_blocks(self, blocks: Int32Array) -> "Slots":
        return self.at(np.flatnonzero(~np.isin(self.blocks, blocks)))


class SlotTable:
    """The rows of one tier of a pool, in memory that outlives this process."""

    def __init__(self, kept: KeptTable, *, has_groups: bool = False) -> None:
        """has_groups: rows are of several groups of layers."""
        self._has_groups = has_groups
        self._checks, self._rows = kept.checks, kept.rows
        num_words = self._rows.shape[1]
        self._block_size = num_words - row_words(0)
        # Odd factors, so that a change of one word always changes the sum.
        drawn = _mixed(np.uint64(kept.key) + np.arange(num_words + 2, dtype=np.uint64) * _STEP)
        self._factors, self._of_block, self._start = drawn[:-2] | np.uint64(1), drawn[-2] | np.uint64(1), drawn[-1]

    def num_written(self, first: int = 0, end: int | None = None) -> int:
        """Rows of blocks [first, end) that claim to say something."""
        return int(np.count_nonzero(self._checks[first:end]))

    def has_rows(self) -> npt.NDArray[np.bool_]:
        """[num_blocks] whether the block's row claims to say something."""
        return np.asarray(self._checks != 0)

    def write(self, slots: Slots) -> None:
        """Stores these rows. A block that is named twice is said the same of."""
        rows = np.empty((len(slots), self._rows.shape[1]), np.int32)
        head = np.empty((len(slots), 3), np.int64)
        head[:, 0], head[:, 1], head[:, 2] = slots.names, slots.parents, slots.digests.view(np.int64)
        if slots.groups is not None:
            head[:, 0] |= slots.groups.astype(np.int64) << _GROUP_BITS
        rows[:, : row_words(0)] = head.view(np.int32)
        rows[:, row_words(0) :] = slots.tokens
        self._rows[slots.blocks] = rows
        self._checks[slots.blocks] = self._check(slots.blocks, rows)

    def forget(self, blocks: Int32Array) -> None:
        """The rows of these blocks say nothing from now on."""
        self._checks[blocks] = 0

    def forget_all_but(self, blocks: Int32Array) -> None:
        """Of all other rows, torn and damaged ones among them."""
        stays = np.zeros(len(self._checks), np.bool_)
        stays[blocks] = True
        self._checks[~stays] = 0

    def read(self, first: int = 0, end: int | None = None) -> Slots:
        """All rows of blocks [first, end) whose check fits, by block. The null block has none."""
        blocks = np.flatnonzero(self._checks[first:end]).astype(np.int32) + np.int32(first)
        blocks = blocks[blocks > 0]
        rows = self._rows[blocks]
        fits = self._check(blocks, rows) == self._checks[blocks]
        blocks, rows = blocks[fits], rows[fits]
        head = np.ascontiguousarray(rows[:, : row_words(0)]).view(np.int64)
        names, tokens, digests = head[:, 0], rows[:, row_words(0) :], head[:, 2].copy().view(np.uint64)
        if not self._has_groups:
            return Slots(blocks, names, head[:, 1], tokens, digests)
        names, groups = names & ((1 << _GROUP_BITS) - 1), (names >> _GROUP_BITS).astype(np.int8)
        return Slots(blocks, names, head[:, 1], tokens, digests, groups)

    def _check(self, blocks: Int32Array, rows: Int32Array) -> UInt64Array:
        """[n] of rows [n, words]; never 0."""
        sums = rows.view(np.uint32).astype(np.uint64) @ self._factors
        return _mixed(sums + blocks.astype(np.uint64) * self._of_block + self._start) | np.uint64(1)


def _mixed(values: UInt64Array) -> UInt64Array:
    """Each bit of the result depends on each bit of the value (the finish of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return np.asarray(values ^ (values >> np.uint64(31)), np.uint64)
