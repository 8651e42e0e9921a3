"""tree_of: the prefix tree that the rows of a kept index describe.

Pure array work, of a few passes over all rows. Rules: a row belongs to the tree if its ancestors lead to the root of a known
tenant; all others are left out, rings among them. Rows that contradict each other (a name twice, the same tokens twice behind
one parent) make the whole table worthless, because then the program that wrote it was wrong.
"""

from dataclasses import dataclass

import numpy as np

from ..values.types import Int32Array, Int64Array
from .slot_table import Slots

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class KeptTree:
    """n nodes, parents before children. A node's number is its place plus 1.

    parents [n]: the number of the parent, or its root, which is negative. roots [n]. levels: the places [start, end) of each
    depth, from the children of roots down.
    """

    slots: Slots
    parents: Int32Array
    roots: Int32Array
    levels: tuple[tuple[int, int], ...]

    def leaves_first(self) -> Int32Array:
        """[n] blocks, leaves before parents; of the others those first that were published, or had a child, longest ago."""
        last = self.slots.names.copy()  # names grow: the largest one below a node tells when it was last of use
        for start, end in reversed(self.levels[1:]):
            np.maximum.at(last, self.parents[start:end] - 1, last[start:end])
        depths = np.repeat(np.arange(len(self.levels)), [end - start for start, end in self.levels])
        return self.slots.blocks[np.lexsort((-depths, last))]


def tree_of(slots: Slots, num_roots: int) -> KeptTree:
    """num_roots: tenants that are known, with the roots -1 to -num_roots."""
    order = np.argsort(slots.names, kind="stable")
    names = slots.names[order]
    if (names < 1).any() or (names[1:] == names[:-1]).any():
        return _tree(slots, _NO_ROWS, _NO_ROWS, _NO_ROWS, num_roots)
    ups = _ups(slots, order, names, num_roots)
    depths, ends = _climb(ups, len(slots), num_roots)
    in_tree = np.flatnonzero((ends >= len(slots)) & (ends < len(slots) + num_roots))
    tree = _tree(slots, in_tree[np.argsort(depths[in_tree], kind="stable")], ups, depths, num_roots)
    return _tree(slots, _NO_ROWS, ups, depths, num_roots) if _has_twins(tree) else tree


def _ups(slots: Slots, order: Int64Array, names: Int64Array, num_roots: int) -> Int64Array:
    """[n] the place of each row's parent; n + k - 1 for the root -k, and n + num_roots for a parent that is not there."""
    num, parents = len(slots), slots.parents
    if not num:
        return _NO_ROWS
    at = np.minimum(np.searchsorted(names, parents), num - 1)
    ups = np.where(names[at] == parents, order[at], num + num_roots)
    is_root = (parents < 0) & (parents >= -num_roots)
    return np.where(is_root, num - 1 - parents, ups)


def _climb(ups: Int64Array, num: int, num_roots: int) -> tuple[Int64Array, Int64Array]:
    """[n] steps from each row to where its ancestors end, and [n] that end; by doubling the steps, so that no order matters."""
    tops = np.arange(num, num + num_roots + 1)
    ends = np.concatenate([ups, tops])
    depths = np.concatenate([np.ones(num, np.int64), np.zeros(len(tops), np.int64)])
    for _ in range(num.bit_length()):
        depths += depths[ends]
        ends = ends[ends]
    return depths[:num], ends[:num]  # a row on a ring, or below one, ends at a row


def _tree(slots: Slots, places: Int64Array, ups: Int64Array, depths: Int64Array, num_roots: int) -> KeptTree:
    """Of the rows at these places, parents before children."""
    num = len(slots)
    numbers = np.zeros(num + num_roots + 1, np.int64)
    numbers[places] = np.arange(1, len(places) + 1)
    numbers[num:] = -1 - np.arange(num_roots + 1)
    parents = numbers[ups[places]].astype(np.int32) if len(places) else np.empty(0, np.int32)
    starts = np.flatnonzero(np.diff(depths[places], prepend=0)) if len(places) else _NO_ROWS
    levels = tuple(zip(starts.tolist(), [*starts[1:].tolist(), len(places)], strict=False))
    roots = parents.copy()
    for start, end in levels[1:]:
        roots[start:end] = roots[parents[start:end] - 1]
    return KeptTree(slots.at(places), parents, roots, levels)


def _has_twins(tree: KeptTree) -> bool:
    """Whether two nodes have the same tokens behind the same parent."""
    _, of_parent, counts = np.unique(tree.parents, return_inverse=True, return_counts=True)
    siblings = counts[of_parent] > 1  # most nodes have none
    rows = np.column_stack([tree.parents[siblings], tree.slots.tokens[siblings]])
    return len({row.tobytes() for row in rows}) < len(rows)
