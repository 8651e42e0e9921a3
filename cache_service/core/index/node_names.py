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
        """child(name of the parent, tokens as LE32): the name of a block. root(tenant): what its first blocks are behind."""
        self.child = child
        self._index, self._make_root = index, root
        self._roots: list[bytes] = []  # in the order of the tenants
        self._known: dict[int, tuple[bytes, bytes, int]] = {}  # by node: its key in the index, its name, and its tenant's root

    def first(self, tenant: str) -> bytes:
        """The name that a tenant's first blocks are behind, also of a tenant that this index has not met."""
        return self._make_root(tenant)

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
        tenants = self._index.tenants
        while len(self._roots) < len(tenants):
            self._roots.append(self._make_root(tenants[len(self._roots)]))
        return self._roots[-root - 1]
