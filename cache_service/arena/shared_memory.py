"""SharedMemoryArena: the memory of one pool on a CPU, a memfd that other processes map too.

Owns the descriptor and this process's mapping. A memfd has no name, so nothing is left behind by a crash and no sweep or
resource tracker can remove it; its pages are taken for real at once, so that a shortage is a refusal here and not a SIGBUS
later. Knows blocks only as rows of bytes.
"""

import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

from cache_service.arena import memory_limit
from cache_service.arena.memory_limit import OutOfMemory
from cache_service.types import Copies, TransferKind

ByteArray = npt.NDArray[np.uint8]


class SharedMemoryArena:
    """[num_bytes] bytes, all zero at first. Raises OutOfMemory."""

    def __init__(self, num_bytes: int) -> None:
        memory_limit.require(num_bytes)
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("kvkeeper-arena", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, num_bytes)
            self._mapping = mmap.mmap(self.descriptor, num_bytes)
        except (OSError, OverflowError) as error:
            os.close(self.descriptor)
            raise OutOfMemory(f"{num_bytes} bytes could not be reserved: {error}") from None
        self.array: ByteArray = np.frombuffer(self._mapping, np.uint8)  # [num_bytes]
        # Also for an arena that was made in a thread while whoever waited for it was cancelled.
        self._close_descriptor = weakref.finalize(self, os.close, self.descriptor)

    def blocks(self, num_blocks: int, block_bytes: int) -> ByteArray:
        """[num_blocks, block_bytes], a view of the front of the arena."""
        return self.array[: num_blocks * block_bytes].reshape(num_blocks, block_bytes)

    def close(self) -> None:
        """Gives up the memory here: unmapped when the last view is gone, kept by the system while others map it."""
        del self.array, self._mapping
        self._close_descriptor()


def copy_blocks(blocks: ByteArray, copies: Copies, hosts: ByteArray | None = None) -> None:
    """Copies rows, first between blocks [num_blocks, block_bytes] and hosts [num_host_blocks, block_bytes], then of blocks.

    In list order: a later copy reads what an earlier one wrote.
    """
    for kind, source, destination in zip(
        copies.transfer_kinds.tolist(),
        copies.transfer_sources.tolist(),
        copies.transfer_destinations.tolist(),
        strict=True,
    ):
        assert hosts is not None, "a transfer without a host tier"
        if kind == TransferKind.SWAP_OUT:
            hosts[destination] = blocks[source]
        else:
            blocks[destination] = hosts[source]
    for source, destination in zip(copies.sources.tolist(), copies.destinations.tolist(), strict=True):
        blocks[destination] = blocks[source]
