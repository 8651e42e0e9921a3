"""Names of nodes that are made of their parents' names and their tokens, and so hold beyond this index.

Owns the names that were made. Numbers of nodes are used again; an entry here counts while the index has the very key object
that it was made of.
"""

import struct
from collections.abc import Callable

from .prefix_index import PrefixIndex

_PARENT = struct.Struct("<i")


class NodeNames:
    """The names of one pool's nodes, of one kind."""

    def __init__(self, index: PrefixIndex, child: Callable[[bytes, bytes], bytes], root: Callable[[str], bytes]) -> None:
        """child(name of the parent, tokens as LE32): the name of a block. root(scope): what its first blocks are behind."""
        self.child = child
        self._index, self._make_root = index, root
        self._roots: dict[int, tuple[str, bytes]] = {}  # by root: its scope, and its name
        self._known: dict[int, tuple[bytes, bytes, int]] = {}  # by node: its key in the index, its name, and its root

    def first(self, scope: str) -> bytes:
        """The name that a scope's first blocks are behind, also of a scope that this index has not met."""
        return self._make_root(scope)

    def of(self, node: int) -> bytes:
        """The name of a node in use, or of a root."""
        return self._look_up(node)[0]

    def get_root(self, node: int) -> int:
        """The root that a node in use is below."""
        return self._look_up(node)[1]

    def _look_up(self, node: int) -> tuple[bytes, int]:
        """The name of a node in use, or of a root, and its root."""
        path: list[tuple[int, bytes]] = []
        name, root = None, 0
        while node > 0:
            key = self._index.key(node)
            assert key is not None, "a node in use has a key, and so have its ancestors"
            known = self._known.get(node)
            if known is not None and known[0] is key:
                _, name, root = known
                break
            path.append((node, key))
            (node,) = _PARENT.unpack_from(key)
        if name is None:
            name, root = self._root(node), node
        for below, key in reversed(path):
            name = self.child(name, key[_PARENT.size :])
            self._known[below] = key, name, root
        return name, root

    def _root(self, root: int) -> bytes:
        scope = self._index.roots.scope(root)
        known = self._roots.get(root)
        if known is None or known[0] != scope:  # numbers of roots are used again, too
            known = self._roots[root] = scope, self._make_root(scope)
        return known[1]
