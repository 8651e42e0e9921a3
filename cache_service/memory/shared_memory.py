"""SharedMemoryArena: the memory of one pool on a CPU, a memfd or a file that other processes map too.

Owns the descriptor and this process's mapping. A memfd has no name, so a crash leaves nothing behind and no sweep or resource
tracker can remove it. Its pages are reserved at once, so that a shortage is a refusal here and not a SIGBUS later. Knows blocks
only as rows of bytes.
"""

import mmap
import os
import weakref
from functools import cached_property

import numpy as np

from kvkeeper.common.service import memory_limit
from kvkeeper.common.service.memory_limit import OutOfMemory
from kvkeeper.common.service.sizes import size

from ..core.values.copies import Copies
from ..core.values.types import TransferKind
from .arena import Arena, ByteArray, Place
from .host_packing import HostPacking


class SharedMemoryArena:
    """An Arena of [num_bytes] bytes, and a KeptArena where its file has a page more. Raises OutOfMemory."""

    place = Place()  # its file

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        """descriptor: of a file with its pages, closed with the arena. By default a memfd is made, all zero."""
        self.num_bytes = num_bytes
        self.descriptor = _reserved(num_bytes) if descriptor is None else descriptor
        try:
            self._mapping = mmap.mmap(self.descriptor, num_bytes)
        except (OSError, OverflowError) as error:
            os.close(self.descriptor)
            raise OutOfMemory(f"{size(num_bytes)} could not be mapped: {error}") from None
        self.array: ByteArray = np.frombuffer(self._mapping, np.uint8)  # [num_bytes]
        # Closes also an arena that was made in a thread for a call that was cancelled meanwhile.
        self._close_descriptor = weakref.finalize(self, os.close, self.descriptor)

    def blocks(self, num_blocks: int, block_bytes: int) -> ByteArray:
        """[num_blocks, block_bytes], a view of the front of the arena."""
        return self.array[: num_blocks * block_bytes].reshape(num_blocks, block_bytes)

    def fields(self) -> dict[str, object]:
        return {"kind": "memfd", "num_bytes": self.num_bytes}

    def descriptors(self) -> list[int]:
        """The memfd."""
        return [self.descriptor]

    @cached_property
    def read_only_descriptor(self) -> int:
        """A descriptor of the same file, for processes that must not write; they cannot map it to write."""
        descriptor = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def read(self, first: int, num_bytes: int) -> bytes:
        return self.array[first : first + num_bytes].tobytes()

    def write(self, first: int, data: bytes) -> None:
        self.array[first : first + len(data)] = np.frombuffer(data, np.uint8)

    def copy(self, copies: Copies, block_bytes: int, hosts: ByteArray | None, packing: HostPacking | None = None) -> None:
        blocks = self.blocks(self.num_bytes // block_bytes, block_bytes)
        for kind, source, destination in list_transfers(copies):
            assert hosts is not None, "a transfer without a host tier"
            if packing is not None and kind == TransferKind.SWAP_OUT:
                packing.pack(blocks[source], hosts[destination])
            elif packing is not None:
                packing.unpack(hosts[source], blocks[destination])
            elif kind == TransferKind.SWAP_OUT:
                hosts[destination] = blocks[source]
            else:
                blocks[destination] = hosts[source]
        for source, destination in zip(copies.sources.tolist(), copies.destinations.tolist(), strict=True):
            blocks[destination] = blocks[source]

    def read_stamp(self, num_bytes: int) -> bytes:
        return os.pread(self.descriptor, num_bytes, whole_pages(self.num_bytes))

    def write_stamp(self, stamp: bytes) -> None:
        os.pwrite(self.descriptor, stamp, whole_pages(self.num_bytes))

    def keep(self) -> None:
        """The file is enough."""

    def forget(self) -> None:
        """The file is all there is."""

    def close(self, *, is_mapped: bool = False) -> None:
        """Gives up this process's mapping: unmapped with its last view, kept by the system while others map the arena."""
        del self.array, self._mapping
        self._close_descriptor()


def whole_pages(num_bytes: int) -> int:
    """The size of so many bytes in whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _reserved(num_bytes: int) -> int:
    """A memfd with its pages. Raises OutOfMemory."""
    memory_limit.require(num_bytes)
    try:
        descriptor = os.memfd_create("kvkeeper-arena", os.MFD_CLOEXEC)
    except OSError as error:
        raise OutOfMemory(f"memfd_create: {error.strerror}") from None
    reserve_pages(descriptor, num_bytes)
    return descriptor


def reserve_pages(descriptor: int, num_bytes: int) -> None:
    """Gives the file so many bytes, and each its page. Raises OutOfMemory, with the descriptor closed."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except (OSError, OverflowError) as error:
        os.close(descriptor)
        raise OutOfMemory(f"{size(num_bytes)} could not be reserved: {error}") from None


def list_transfers(copies: Copies) -> list[tuple[int, int, int]]:
    """(kind, source, destination) of each, as plain numbers."""
    columns = (copies.transfer_kinds, copies.transfer_sources, copies.transfer_destinations)
    return list(zip(*(column.tolist() for column in columns), strict=True))


class SharedMemory:
    """Allocates arenas in the machine's memory."""

    def available_bytes(self) -> int:
        return memory_limit.available_bytes()

    def require(self, num_bytes: int, num_host_bytes: int) -> None:
        """Raises OutOfMemory where arenas of num_bytes and host tiers of num_host_bytes do not fit now."""
        memory_limit.require(num_bytes + num_host_bytes)

    def allocate(self, num_bytes: int, rank: int = 0) -> Arena:
        """All ranks have the same memory. Raises OutOfMemory."""
        return SharedMemoryArena(num_bytes)

    def allocate_host(self, num_bytes: int) -> SharedMemoryArena:
        """Raises OutOfMemory."""
        return SharedMemoryArena(num_bytes)
