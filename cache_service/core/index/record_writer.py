"""RecordWriter: writes down, slice by slice, what the record of a kept index still lacks.

What is written is read from the index at that moment. A digest of what blocks hold may be made between `take` and
`write_taken`, outside of any call. An index that is not kept has no record, and nothing to write.
"""

import numpy as np

from ..values.kept_index import Digest, UInt64Array
from ..values.types import NO_INT32, Tier
from .index_record import Unwritten
from .prefix_index import PrefixIndex


class RecordWriter:
    """Writes the record of one index."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def write(self, max_blocks: int, digest: Digest | None = None) -> bool:
        """Writes down up to so many of the blocks that the record lacks. Whether more are left."""
        taken = self.take(max_blocks)
        return self.write_taken(taken, digest(taken.tier, taken.blocks) if digest is not None else None)

    def take(self, max_blocks: int) -> Unwritten:
        """Up to so many of the blocks that the record lacks; for `write_taken`, perhaps after other calls."""
        if self._index.record is None:
            return Unwritten(Tier.DEVICE, NO_INT32)
        return self._index.record.take(max_blocks, self._index.node_of_block, self._index.node_of_host)

    def write_taken(self, taken: Unwritten, digests: UInt64Array | None) -> bool:
        """Writes these down, as far as they have not lost their nodes since. digests [n]. Whether more are left."""
        record = self._index.record
        of_tier = record.of(taken.tier) if record is not None else None
        if record is None or of_tier is None:
            return False
        stays = of_tier.end_taking(taken.blocks)
        blocks = taken.blocks[stays]
        if len(blocks):
            index, is_device = self._index, taken.tier is Tier.DEVICE
            nodes = (index.node_of_block if is_device else index.node_of_host)[blocks]
            groups = index.held.groups_of(blocks) if is_device else index.held.groups_of_hosts(blocks)
            keys = [key for node in nodes.tolist() if (key := index.key(node)) is not None]
            words = np.frombuffer(b"".join(keys), "<i4").reshape(len(nodes), -1)
            made = digests[stays] if digests is not None else np.zeros(len(blocks), np.uint64)
            record.write(taken.tier, blocks, nodes, words[:, 0], words[:, 1:], made, groups)
        return record.is_behind
