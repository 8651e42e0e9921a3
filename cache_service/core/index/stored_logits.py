"""Stored last-token logits: with them, a prompt that is cached whole needs no forward pass.

Owns the logits that follow cached prefixes, by the node of the prefix's last block, and their bound. Rules: all have one size;
they are forgotten with their node, and the least recently used ones where they are too many; a session keeps the logits that a
start was promised (session_state.py), so that forgetting them here does not break the promise. Does not know sequences, nor
what the numbers mean to the engine. Once nothing is stored, the next logits may have another size.
"""

from collections import OrderedDict

import numpy as np

from ..values.errors import InvalidField

_FLOAT32 = np.dtype("<f4")


class StoredLogits:
    """The logits of one pool. The index removes the entries of forgotten nodes from `by_node`."""

    def __init__(self, max_bytes: int) -> None:
        self.by_node: OrderedDict[int, bytes] = OrderedDict()  # the least recently used first
        self.max_bytes = max_bytes

    @property
    def num_bytes_each(self) -> int:
        """The size of each entry; 0 while none is stored."""
        return len(next(iter(self.by_node.values()), b""))

    def check(self, logits: bytes) -> None:
        """Raises InvalidField for logits that cannot be stored beside those stored before."""
        size = self.num_bytes_each or len(logits)
        if len(logits) != size or not size or size % _FLOAT32.itemsize:
            text = "one float32 for each entry of the vocabulary, as many as in the logits stored before"
            raise InvalidField(text, field="logits", limit=self.num_bytes_each or _FLOAT32.itemsize)
        if size > self.max_bytes:
            raise InvalidField("more bytes than stored logits may take", field="logits", limit=self.max_bytes)
        if not np.isfinite(np.frombuffer(logits, _FLOAT32)).all():
            raise InvalidField("all logits are finite", field="logits")

    def put(self, node: int, logits: bytes) -> None:
        """Stores checked logits in place of the node's earlier ones; drops the least recently used where they are too many."""
        self.by_node[node] = logits
        self.by_node.move_to_end(node)
        while len(self.by_node) * len(logits) > self.max_bytes:
            self.by_node.popitem(last=False)

    def get(self, node: int) -> bytes | None:
        """The node's logits, which counts as a use."""
        logits = self.by_node.get(node)
        if logits is not None:
            self.by_node.move_to_end(node)
        return logits
