"""FakeCuda: the CUDA runtime as several processes see it, on files: what one allocates, another opens by its handle.

One object is one process. It keeps the rules that a device has and that are easily broken: an allocation cannot be opened where
it was made, is mapped once per process however often it is opened, one close ends that, and what was freed cannot be opened
any more, while processes that have it mapped still have its bytes.
"""

import ctypes
import itertools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.runtime import HANDLE_BYTES, MOST_COPIES

DEVICE = "ab" * 16
_OFFSET = 512  # of an allocation in what its handle opens


@dataclass(slots=True)
class FakeCuda:
    """Device 0 is called DEVICE. folder: the device's memory; capacity: bytes of it that this process may take."""

    folder: Path
    name: str
    capacity: int = 1 << 40
    uuids: tuple[str, ...] = (DEVICE,)
    can_pin: bool = True
    can_copy_many: bool = True
    batches: list[int] = field(default_factory=list)  # numbers of copies of the calls of copy_many
    pinned: set[int] = field(default_factory=set)
    made: dict[int, tuple[Path, mmap.mmap, int]] = field(default_factory=dict)  # by pointer
    opened: dict[int, tuple[str, mmap.mmap]] = field(default_factory=dict)  # by base
    num_freed: int = 0
    num_opens: int = 0
    _numbers: itertools.count = field(default_factory=itertools.count)

    def device_uuids(self) -> list[str]:
        return list(self.uuids)

    def allocate(self, device: int, num_bytes: int) -> int:
        if num_bytes > self.free_bytes(device):
            raise CudaError("cudaMalloc", "cudaErrorMemoryAllocation")
        path = self.folder / f"{self.name}-{next(self._numbers)}"
        path.write_bytes(b"\xa5" * (_OFFSET + num_bytes))
        mapping = _map(path)
        pointer = _address(mapping) + _OFFSET
        self.made[pointer] = path, mapping, num_bytes
        return pointer

    def free(self, device: int, pointer: int) -> None:
        path, _, _ = self.made.pop(pointer)
        path.unlink()
        self.num_freed += 1

    def clear(self, device: int, pointer: int, num_bytes: int) -> None:
        ctypes.memset(pointer, 0, num_bytes)

    def export(self, device: int, pointer: int) -> tuple[bytes, int]:
        path, _, _ = self.made[pointer]
        return path.name.encode().ljust(HANDLE_BYTES, b"\0"), _OFFSET

    def open(self, device: int, handle: bytes) -> int:
        path = self.folder / handle.rstrip(b"\0").decode()
        if any(path == made for made, _, _ in self.made.values()):
            raise CudaError("cudaIpcOpenMemHandle", "cudaErrorDeviceUninitialized")
        if not path.exists():
            raise CudaError("cudaIpcOpenMemHandle", "cudaErrorInvalidResourceHandle")
        for base, (name, _) in self.opened.items():
            if name == path.name:
                return base
        self.num_opens += 1
        mapping = _map(path)
        self.opened[_address(mapping)] = path.name, mapping
        return _address(mapping)

    def close(self, device: int, base: int) -> None:
        self.opened.pop(base)

    def copy(self, device: int, destination: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(destination, source, num_bytes)

    def copy_many(
        self, device: int, stream: int, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """In the order that breaks most: from the last one to the first. Ranges that depend on each other are refused."""
        assert stream, "not the default stream"
        assert 0 < len(sizes) <= MOST_COPIES
        if not self.can_copy_many:
            raise CudaError("cudaMemcpyBatchAsync", "cudaErrorNotSupported")
        spans = [(start, start + size) for start, size in zip(destinations, sizes, strict=True)]
        reads = [(start, start + size) for start, size in zip(sources, sizes, strict=True)]
        for at, (first, end) in enumerate(spans):
            others = [*spans[:at], *spans[at + 1 :], *reads]
            assert all(end <= other_first or other_end <= first for other_first, other_end in others), "copies depend"
        for destination, source, size in reversed(list(zip(destinations, sources, sizes, strict=True))):
            ctypes.memmove(destination, source, size)
        self.batches.append(len(sizes))

    def register_host(self, device: int, pointer: int, num_bytes: int) -> None:
        if not self.can_pin or pointer in self.pinned:
            raise CudaError("cudaHostRegister", "cudaErrorHostMemoryAlreadyRegistered")
        self.pinned.add(pointer)

    def unregister_host(self, device: int, pointer: int) -> None:
        self.pinned.remove(pointer)

    def free_bytes(self, device: int) -> int:
        return self.capacity - sum(num_bytes for _, _, num_bytes in self.made.values())

    def synchronize(self, device: int) -> None:
        pass


def bytes_at(pointer: int, num_bytes: int) -> np.ndarray:
    """The bytes that a pointer of device memory shows, as a kernel would see them."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(pointer))


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _address(mapping: mmap.mmap) -> int:
    return np.frombuffer(mapping, np.uint8).ctypes.data
