"""BlockDigests: short digests of what the blocks of a kept pool hold, so that a later run notices memory that was overwritten.

Rules: a digest is keyed by its file, and never 0. It is of 32 bits, which find damage and withstand no forger; CRC-32, because
it reads three times as many bytes a second as a cryptographic hash or more, and lets other threads run meanwhile.
"""

import zlib

import numpy as np

from ...core.values.kept_index import UInt64Array
from ...core.values.types import Int32Array, Tier
from ..arena import ByteArray
from ..shared_memory import SharedMemoryArena
from .kept_pool import KeptPool, KeptTier

_MARK = 1 << 32  # no digest is 0


class BlockDigests:
    """Of both tiers of one pool. Blocks must not be written meanwhile, or the digest is of no use."""

    def __init__(self, pool: KeptPool) -> None:
        self.block_bytes = pool.spec.block_bytes
        tiers = zip((Tier.DEVICE, Tier.HOST), pool.tiers, strict=False)
        self._blocks = {tier: _blocks(kept) for tier, kept in tiers}
        self._keys = [tier.index.description.key & 0xFFFFFFFF for tier in pool.tiers]

    def of(self, tier: Tier, blocks: Int32Array) -> UInt64Array:
        """[n] digests of blocks [n]; in any thread."""
        rows, key = self._blocks[tier], self._keys[tier is Tier.HOST]
        return np.fromiter((zlib.crc32(rows[block], key) | _MARK for block in blocks.tolist()), np.uint64, len(blocks))


def _blocks(kept: KeptTier) -> ByteArray:
    assert isinstance(kept.arena, SharedMemoryArena), "digests are of memory of the machine"
    return kept.arena.blocks(kept.num_blocks, kept.index.description.block_bytes)
