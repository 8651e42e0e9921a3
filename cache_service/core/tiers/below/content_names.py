"""Names of content that hold beyond one run: what a block holds, behind what it holds it, for which tenant and KV spec.

The name of a block is a keyed hash of its parent's name and its tokens; a tenant's root has one of the tenant. The key is made
of the secret of a slab and the whole KV spec. So two models, revisions or layouts never have a name in common, names of two
slabs cannot be compared, and without the key a name tells nothing of a prompt, nor are two prompts of one name found. Numbers
of nodes are used again; an entry here counts while the index has the very key object that it was made of.
"""

import hashlib
import struct

from ...index.prefix_index import PrefixIndex
from ...values.copies import NAME_BYTES

_PARENT = struct.Struct("<i")


class ContentNames:
    """The names of one pool's nodes."""

    def __init__(self, index: PrefixIndex, key: bytes) -> None:
        """key: 1 to 64 bytes, of this slab and KV spec alone."""
        self._index = index
        self._key = key
        self._roots: list[bytes] = []  # in the order of the tenants
        self._known: dict[int, tuple[bytes, bytes, int]] = {}  # by node: its key in the index, its name, and its tenant's root

    def child(self, parent: bytes, tokens: bytes) -> bytes:
        """The name of a block with these tokens, LE32, behind a parent of that name."""
        return hashlib.blake2b(parent + tokens, digest_size=NAME_BYTES, key=self._key).digest()

    def of_group(self, name: bytes, group: int) -> bytes:
        """The name of what a group of layers has of the content of this name; of the first group the name itself."""
        if not group:
            return name
        return hashlib.blake2b(name, digest_size=NAME_BYTES, key=self._key, person=b"group" + struct.pack("<I", group)).digest()

    def of(self, node: int) -> bytes:
        """The name of a node in use, or of a root."""
        return self._look_up(node)[0]

    def root_of(self, node: int) -> int:
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
            tenant = tenants[len(self._roots)].encode()
            self._roots.append(hashlib.blake2b(tenant, digest_size=NAME_BYTES, key=self._key, person=b"tenant").digest())
        return self._roots[-root - 1]
