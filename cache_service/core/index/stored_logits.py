"""Stored last-token logits: what makes a forward pass for a prompt that is cached whole unnecessary.

Owns the logits that follow cached prefixes, by the node of the prefix's last block, and their bound. Rules: all have one size;
they go with their node, the least recently used first where they are too many; a start that was promised some holds them by
itself (session_state.py), so that nothing that goes meanwhile breaks the promise. Does not know sequences; what the numbers
mean is the engine's. Once nothing is stored, the next may have another size.
"""

from collections import OrderedDict

import numpy as np

from ..values.errors import InvalidField

_FLOAT32 = np.dtype("<f4")


class StoredLogits:
    """The logits of one pool. `by_node` is looked at by the index, which forgets the entries of nodes that go."""

    def __init__(self, max_bytes: int) -> None:
        self.by_node: OrderedDict[int, bytes] = OrderedDict()  # the least recently used first
        self.max_bytes = max_bytes

    @property
    def num_bytes_each(self) -> int:
        """The one size; 0 while none are stored."""
        return len(next(iter(self.by_node.values()), b""))

    def check(self, logits: bytes) -> None:
        """Raises InvalidField for what cannot be stored beside what was stored before."""
        size = self.num_bytes_each or len(logits)
        if len(logits) != size or not size or size % _FLOAT32.itemsize:
            text = "one float32 for each entry of the vocabulary, as many as in those that are stored"
            raise InvalidField(text, field="logits", limit=self.num_bytes_each or _FLOAT32.itemsize)
        if size > self.max_bytes:
            raise InvalidField("more bytes than stored logits may take", field="logits", limit=self.max_bytes)
        if not np.isfinite(np.frombuffer(logits, _FLOAT32)).all():
            raise InvalidField("all logits are finite", field="logits")

    def put(self, node: int, logits: bytes) -> None:
        """Checked logits. Those stored there before give way, and the least recently used where there are too many."""
        self.by_node[node] = logits
        self.by_node.move_to_end(node)
        while len(self.by_node) * len(logits) > self.max_bytes:
            self.by_node.popitem(last=False)

    def get(self, node: int) -> bytes | None:
        """A use of them."""
        logits = self.by_node.get(node)
        if logits is not None:
            self.by_node.move_to_end(node)
        return logits
