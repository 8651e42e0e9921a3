"""The block tables of the sequences of one pool.

Owns the rows of block ids, and where the holes of each end. A row has a table for each group of layers, one behind the other,
so that one number, group * max_blocks + table index, is the place of an entry. A table has an entry for each block that the
reserved tokens need; NULL_BLOCK is a hole, see spans.py. Other parts read the columns; only the methods here write them. Does
not know states or tokens.
"""

import numpy as np

from kvkeeper.common.rows import untouched

from ..values.types import NULL_BLOCK, Int32Array, Int64Array


class BlockTables:
    """One row per slot. Rows of free slots hold leftovers; memory is touched only as far as rows are used."""

    def __init__(
        self,
        num_reserved: Int32Array,
        block_size: int,
        max_blocks: int,
        num_groups: int,
        state_groups: tuple[int, ...],
    ) -> None:
        """num_reserved [slots]: tokens that each table has entries for; a column that the sequence table writes."""
        self._num_reserved = num_reserved
        # Each entry's states, the last group's first, go before its block of the first group, and all others behind those.
        self._by_entry = (*reversed(state_groups), 0)
        self._others = tuple(group for group in range(num_groups) if group not in self._by_entry)
        self._block_size, self._max_blocks, self._num_groups = block_size, max_blocks, num_groups
        self.rows: Int32Array = untouched(len(num_reserved), num_groups * max_blocks)
        # Entries before this table index may be holes. Of a group of states any may be, and before it all are but checkpoints.
        self.hole_ends: Int32Array = np.zeros((len(num_reserved), num_groups), np.int32)

    def get(self, slot: int, group: int = 0) -> Int32Array:
        """[ceil(reserved / block size)] block ids of a group, NULL_BLOCK for a hole; a view."""
        first, num_blocks = group * self._max_blocks, -(-int(self._num_reserved[slot]) // self._block_size)
        return self.rows[slot, first : first + num_blocks]

    def get_further(self, slot: int) -> tuple[Int32Array, ...]:
        """Those of the groups behind the first; () where there is one group."""
        return tuple(self.get(slot, group) for group in range(1, self._num_groups))

    def get_from(self, slot: int, start: int) -> Int32Array:
        """[groups * n] the entries from table index `start` on, one group behind the other; of one group a view."""
        if self._num_groups == 1:
            return self.get(slot)[start:]
        return np.concatenate([self.get(slot, group)[start:] for group in range(self._num_groups)])

    def held(self, slot: int) -> Int32Array:
        """The blocks that a table names, in order, without its holes; behind them those of the other groups."""
        if self._num_groups == 1 and not self.hole_ends[slot, 0]:
            return self.get(slot)
        blocks = self.get_from(slot, 0)
        return blocks[blocks != NULL_BLOCK]

    def leaves_first(self, slot: int, start: int = 0) -> Int32Array:
        """The blocks that the tables name from table index `start` on, those that are to be forgotten first at the front.

        These are the deepest. States go before the block that they are behind. All else goes after the first group: with its
        blocks, those of the others are forgotten.
        """
        if self._num_groups == 1 and not self.hole_ends[slot, 0]:
            return self.get(slot)[start:][::-1]
        by_entry = np.stack([self.get(slot, group)[start:][::-1] for group in self._by_entry], 1)
        blocks = np.concatenate([by_entry.ravel(), *(self.get(slot, group)[start:][::-1] for group in self._others)])
        return blocks[blocks != NULL_BLOCK]

    def place(self, slot: int, start: int, blocks: Int32Array) -> None:
        """Consecutive entries of the first group, from table index `start` on."""
        self.rows[slot, start : start + len(blocks)] = blocks

    def place_further(self, slot: int, start: int, blocks: Int32Array, first_holes: int = 0) -> None:
        """Entries of the groups behind the first [groups - 1, n], from table index `start` on; 0 is a hole.

        first_holes: of the first entries placed, those that may be holes.
        """
        for group, row in enumerate(blocks, 1):
            first = group * self._max_blocks + start
            self.rows[slot, first : first + len(row)] = row
            if first_holes:
                there = row[:first_holes].nonzero()[0]
                self.hole_ends[slot, group] = start + (int(there[0]) if len(there) else first_holes)

    def place_whole(self, slot: int, blocks: Int32Array) -> None:
        """The tables of all groups [groups * entries], one behind the other."""
        for group, row in enumerate(blocks.reshape(self._num_groups, -1)):
            first = group * self._max_blocks
            self.rows[slot, first : first + len(row)] = row

    def set_blocks(self, slots: Int64Array | int, places: Int64Array | Int32Array, blocks: Int32Array) -> None:
        """One entry each: the block at places[i] of slots[i], or of one slot, is blocks[i]."""
        self.rows[slots, places] = blocks

    def copy(self, source: int, destination: int, num_blocks: int) -> None:
        """The first entries of each group are those of another row."""
        for group in range(self._num_groups):
            first = group * self._max_blocks
            self.rows[destination, first : first + num_blocks] = self.rows[source, first : first + num_blocks]

    def open_hole(self, slot: int, group: int, places: Int64Array, end: int) -> None:
        """These places of the group's table are holes; the last hole ends before table index `end`."""
        self.rows[slot, places] = NULL_BLOCK
        self.hole_ends[slot, group] = end
