"""A walk over the whole prefix tree, children before their parents, that may stop at any node and go on later.

Owns the way from the root to where the walk stands. Rules: the nodes of one take hold all of their descendants, so that
forgetting them forgets no others; between two takes the tree may lose any nodes, and what it gains may be left out.
"""

import numpy as np

from ..values.types import Int32Array
from .node_links import NO_NODE
from .prefix_index import PrefixIndex


class LeafWalk:
    """A walk over the trees of all scopes that are there when it begins."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._way = [
            -number for number in range(1, len(index.roots.scopes) + 1)
        ]  # the next root last; behind a root, nodes that lead to the next one to be taken

    @property
    def is_over(self) -> bool:
        return not self._way

    def take_nodes(self, most: int) -> Int32Array:
        """At most so many nodes, to be forgotten before the next take. Perhaps none: the way to a leaf is long, and counts."""
        index, way = self._index, self._way
        taken: list[int] = []
        left: dict[int, int] = {}  # by parent: the sibling behind the child that was taken last
        for _ in range(2 * most):
            if not way or len(taken) == most:
                break
            node = way[-1]
            if node > 0 and index.key(node) is None:  # forgotten since the last take
                way.pop()
                continue
            child = left.get(node, int(index.links.first_child[node]))
            if child != NO_NODE:
                way.append(child)
                continue
            way.pop()
            if node > 0:
                taken.append(node)
                left[index.parent(node)] = int(index.links.next_sibling[node])
        return np.array(taken, np.int32)
