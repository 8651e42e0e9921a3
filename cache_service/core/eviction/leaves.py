"""The cached blocks that may be evicted now, because no cached block below them is left.

Owns the parent of each block, the number of its children, and the set of the leaves, from which a policy chooses by any order.
So leaves go before their parents whatever that order is, and no walk of the tree is needed: removing a leaf may make its
parent one. A block is in the set from the time that it waits without children; entries that no longer hold are dropped when
they are looked at. All operations are a fixed number of array operations for any number of blocks.
"""

import numpy as np
import numpy.typing as npt

from ..values.distinct import distinct
from ..values.types import Int32Array
from .block_queue import Stamps

_NOT_IN_SET = -1


BoolArray = npt.NDArray[np.bool_]


class Leaves:
    """parents [num_blocks], 0 where it is not known; num_children [num_blocks]; 16 bytes a block with the set."""

    def __init__(self, num_blocks: int, stamps: Stamps) -> None:
        self.parents: Int32Array = np.zeros(num_blocks, np.int32)
        self.num_children: Int32Array = np.zeros(num_blocks, np.int32)
        self._stamps = stamps
        self._set: Int32Array = np.zeros(num_blocks, np.int32)  # dense, in no order
        self._places: Int32Array = np.full(num_blocks, _NOT_IN_SET, np.int32)
        self._size = 0

    def link(self, parents: Int32Array, children: Int32Array) -> None:
        """These blocks are parents of these children; pairs may repeat, and may be known."""
        unknown = self.parents[children] != parents
        if not np.count_nonzero(unknown):
            return
        children, first = np.unique(children[unknown], return_index=True)
        former = self._count_off(children)
        self.parents[children] = parents[unknown][first]
        np.add.at(self.num_children, self.parents[children], 1)
        if len(former):
            self.add(distinct(former[self._are_leaves(former)]))

    def add(self, blocks: Int32Array) -> None:
        """These distinct blocks wait."""
        new = blocks[(self.num_children[blocks] == 0) & (self._places[blocks] == _NOT_IN_SET)]
        end = self._size + len(new)
        self._set[self._size : end] = new
        self._places[new] = np.arange(self._size, end)
        self._size = end

    def remove(self, blocks: Int32Array) -> Int32Array:
        """These distinct blocks are evicted. Returns those of their parents that are leaves now."""
        self._drop(blocks)
        parents = self._count_off(blocks)
        leaves = distinct(parents[self._are_leaves(parents)])
        self.add(leaves)
        return leaves

    def forget_blocks(self, blocks: Int32Array) -> None:
        """The contents of these removed blocks are gone."""
        self.parents[blocks] = 0
        self.num_children[blocks] = 0

    def entries(self) -> Int32Array:
        """The blocks of the set without children, waiting or not."""
        whole = self._set[: self._size]
        return whole[self.num_children[whole] == 0]

    def sample(self, most: int, until: int, rng: np.random.Generator) -> Int32Array:
        """All leaves that wait since a stamp up to `until`, or a share of them, no more than twice `most`.

        Of those that wait since later ones it is not known yet whether they have children.
        """
        stride = max(1, self._size // most)
        found = self._set[int(rng.integers(stride)) if stride > 1 else 0 : self._size : stride]
        holds = self._are_leaves(found)
        leaves = found[holds]
        self._drop(found[~holds])
        return leaves[self._stamps.newest[leaves] <= until]

    def among(self, blocks: Int32Array) -> Int32Array:
        """Those of these blocks that are leaves."""
        return blocks[self._are_leaves(blocks)]

    def _are_leaves(self, blocks: Int32Array) -> BoolArray:
        return (self.num_children[blocks] == 0) & (self._stamps.newest[blocks] > 0)

    def _count_off(self, children: Int32Array) -> Int32Array:
        """Their known parents have one child less. Returns these parents."""
        parents = self.parents[children]
        parents = parents[parents > 0]
        np.subtract.at(self.num_children, parents, 1)
        self.num_children[parents] = np.maximum(self.num_children[parents], 0)
        return parents

    def _drop(self, blocks: Int32Array) -> None:
        """Takes distinct blocks out of the set; the last ones move into the gaps."""
        places = self._places[blocks]
        places = places[places != _NOT_IN_SET]
        if not len(places):
            return
        self._places[self._set[places]] = _NOT_IN_SET
        left = self._size - len(places)
        gaps = places[places < left]
        tail = self._set[left : self._size]
        moved = tail[self._places[tail] != _NOT_IN_SET]
        self._set[gaps] = moved
        self._places[moved] = gaps
        self._size = left
