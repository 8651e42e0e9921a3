"""Digests of blocks that leave memory, for every tier that keeps them elsewhere."""

from collections.abc import Callable

from kvkeeper.common.service.memory_limit import OutOfMemory

from .slab_form import DIGEST_BYTES


def digest_under(seed: int) -> Callable[[memoryview], bytes]:
    """XXH3 of 128 bits: as fast as memory, and it finds every accident. That a slot holds what it should is the rows' check."""
    try:
        import xxhash
    except ImportError:
        raise OutOfMemory("this tier needs the package xxhash: pip install xxhash") from None

    def digest(block: memoryview) -> bytes:
        made: bytes = xxhash.xxh3_128_digest(block, seed)
        assert len(made) == DIGEST_BYTES
        return made

    return digest
