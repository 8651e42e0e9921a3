"""NodeLinks: which nodes of the prefix tree are the children of which.

A parent knows its first child, and each child its next and its previous sibling, the youngest first. Roots are parents too:
being negative, they index the end of a column. Knows no keys and no blocks.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from ..values.types import Int32Array

NO_NODE = 0


class NodeLinks:
    """The links of one pool's nodes."""

    def __init__(self, num_nodes: int, max_roots: int) -> None:
        # Entries that are never touched take no memory.
        self.first_child: Int32Array = np.zeros(num_nodes + max_roots, np.int32)
        self.next_sibling: Int32Array = np.zeros(num_nodes, np.int32)
        self.prev_sibling: Int32Array = np.zeros(num_nodes, np.int32)
        self.num_children: Int32Array | None = None  # that each node was given, since they are counted

    @property
    def columns(self) -> tuple[Int32Array, ...]:
        """By node."""
        links = (self.first_child, self.next_sibling, self.prev_sibling)
        return links if self.num_children is None else (*links, self.num_children)

    def children(self, parent: int, most: int) -> list[int]:
        """At most `most` children of a node or root, the youngest first."""
        found: list[int] = []
        child = int(self.first_child[parent])
        while child and len(found) < most:
            found.append(child)
            child = int(self.next_sibling[child])
        return found

    def count_children(self) -> None:
        """From now on it is known which nodes were ever given more than one child."""
        if self.num_children is None:
            self.num_children = np.zeros(len(self.first_child), np.int32)

    def lead_apart(self, path: Int32Array) -> npt.NDArray[np.bool_]:
        """[n] of each node of a path: whether it leads elsewhere, too, or was ever given more than one child."""
        assert self.num_children is not None, "children are not counted"
        apart = self.num_children[path] > 1
        below = path[1:]
        apart[:-1] |= (self.next_sibling[below] | self.prev_sibling[below]) > 0
        apart[-1] |= self.first_child[path[-1]] > 0
        return apart

    def num_shared(self, path: Int32Array) -> int:
        """How many leading nodes of a path are above one that was given more than one child, that one included."""
        assert self.num_children is not None, "children are not counted"
        shared = (self.num_children[path] > 1).nonzero()[0]
        return int(shared[-1]) + 1 if len(shared) else 0

    def link(self, nodes: Int32Array, parents: Int32Array) -> None:
        """Puts these distinct nodes first among their parents' children."""
        if self.num_children is not None:
            np.add.at(self.num_children, parents, np.int32(1))
        heads = tails = nodes  # of the new siblings of each parent
        if len(set(parents.tolist())) < len(parents):  # new siblings are linked among themselves first
            order = np.argsort(parents, kind="stable")
            nodes, parents = nodes[order], parents[order]
            is_sibling = parents[1:] == parents[:-1]  # of the node before
            before, after = nodes[:-1][is_sibling], nodes[1:][is_sibling]
            self.next_sibling[before], self.prev_sibling[after] = after, before
            is_head, is_tail = np.concatenate([[True], ~is_sibling]), np.concatenate([~is_sibling, [True]])
            heads, tails, parents = nodes[is_head], nodes[is_tail], parents[is_head]
        first = self.first_child[parents]
        self.next_sibling[tails] = first
        self.prev_sibling[first] = tails
        self.prev_sibling[NO_NODE] = NO_NODE
        self.first_child[parents] = heads

    def unlink(self, node: int, parent: int) -> None:
        """Takes a node out of its parent's children."""
        after, before = int(self.next_sibling[node]), int(self.prev_sibling[node])
        if before:
            self.next_sibling[before] = after
        else:
            self.first_child[parent] = after
        if after:
            self.prev_sibling[after] = before

    def num_reachable(self, roots: Iterable[int]) -> int:
        """Nodes that a walk from the roots finds: a ring of siblings that no parent reaches shows only here."""
        found, stack, most = 0, [int(self.first_child[root]) for root in roots], len(self.next_sibling)
        while stack and found <= most:
            if node := stack.pop():
                found += 1
                stack += (int(self.next_sibling[node]), int(self.first_child[node]))
        return found

    def check_node(self, node: int, parent: int, parent_of: Callable[[int], int | None]) -> Iterator[str]:
        """The broken invariants of the links of a node in use. parent_of(node): None of a number that is not in use."""
        after, before = int(self.next_sibling[node]), int(self.prev_sibling[node])
        links_here = self.next_sibling[before] if before else self.first_child[parent]
        if links_here != node or (after and self.prev_sibling[after] != node):
            yield f"siblings of node {node} are not linked both ways"
        for sibling in (after, before):
            if sibling and parent_of(sibling) != parent:
                yield f"node {node} has a sibling under another parent"
        child = int(self.first_child[node])
        if child and parent_of(child) != node:
            yield f"node {node} has a child that does not name it"
