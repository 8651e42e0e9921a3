"""Names of content that hold beyond one run: what a block holds, behind what it holds it, for which tenant and KV spec.

The name of a block is a keyed hash of its parent's name and its tokens; a tenant's root has one of the tenant. The key is made
of the secret of a slab and the whole KV spec. So two models, revisions or layouts never have a name in common, names of two
slabs cannot be compared, and without the key a name tells nothing of a prompt, nor are two prompts of one name found.
"""

import hashlib
import struct

from ...index.node_names import NodeNames
from ...index.prefix_index import PrefixIndex
from ...values.copies import NAME_BYTES


class ContentNames:
    """The names of one pool's nodes."""

    def __init__(self, index: PrefixIndex, key: bytes) -> None:
        """key: 1 to 64 bytes, of this slab and KV spec alone."""
        self._key = key
        self._nodes = NodeNames(index, self.child, self._root)
        self.of, self.root_of, self.first = self._nodes.of, self._nodes.root_of, self._nodes.first

    def child(self, parent: bytes, tokens: bytes) -> bytes:
        """The name of a block with these tokens, LE32, behind a parent of that name."""
        return hashlib.blake2b(parent + tokens, digest_size=NAME_BYTES, key=self._key).digest()

    def of_group(self, name: bytes, group: int) -> bytes:
        """The name of what a group of layers has of the content of this name; of the first group the name itself."""
        if not group:
            return name
        return hashlib.blake2b(name, digest_size=NAME_BYTES, key=self._key, person=b"group" + struct.pack("<I", group)).digest()

    def _root(self, tenant: str) -> bytes:
        return hashlib.blake2b(tenant.encode(), digest_size=NAME_BYTES, key=self._key, person=b"tenant").digest()
