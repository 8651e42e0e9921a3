"""CudaArena: the memory of one pool on a CUDA device, an allocation of its own that other processes open by its handle.

Owns the allocation. The cache service runs no kernels and holds no torch: beside the arena, it costs one context on the device.
Such memory ends with the service; what outlives it is held_memory.py. Clients without kernels read, write and copy it through
the service (DeviceBytes), one call a block.

Not yet run on a device.
"""

import itertools

import numpy as np

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.handle import ArenaHandle
from kvkeeper.common.cuda.runtime import CudaRuntime
from kvkeeper.common.service import memory_limit
from kvkeeper.common.service.memory_limit import OutOfMemory
from kvkeeper.common.service.sizes import size

from ...core.values.copies import Copies
from ...core.values.types import TransferKind
from ..arena import Arena, ByteArray
from ..host_packing import HostPacking
from ..shared_memory import SharedMemoryArena, list_transfers


class DeviceBytes:
    """The memory at a pointer of this process. Each call is done when it returns. Raises CudaError."""

    def __init__(self, runtime: CudaRuntime, device: int, pointer: int) -> None:
        self._runtime, self._device, self.pointer = runtime, device, pointer

    def clear(self, num_bytes: int) -> None:
        """Zeros from the beginning on."""
        self._runtime.clear(self._device, self.pointer, num_bytes)

    def read(self, first: int, num_bytes: int) -> bytes:
        data = np.empty(num_bytes, np.uint8)
        self._runtime.copy(self._device, data.ctypes.data, self.pointer + first, num_bytes)
        return data.tobytes()

    def write(self, first: int, data: bytes) -> None:
        array = np.frombuffer(data, np.uint8)
        self._runtime.copy(self._device, self.pointer + first, array.ctypes.data, len(data))

    def copy(self, copies: Copies, block_bytes: int, hosts: ByteArray | None, packing: HostPacking | None = None) -> None:
        """See Arena."""
        whole = np.empty(block_bytes if packing is not None else 0, np.uint8)  # a block on its way, as numbers
        for kind, source, destination in list_transfers(copies):
            assert hosts is not None, "a transfer without a host tier"
            if packing is not None and kind == TransferKind.SWAP_OUT:
                self._runtime.copy(self._device, whole.ctypes.data, self._at(source, block_bytes), block_bytes)
                packing.pack(whole, hosts[destination])
                continue
            if packing is not None:
                packing.unpack(hosts[source], whole)
                self._runtime.copy(self._device, self._at(destination, block_bytes), whole.ctypes.data, block_bytes)
                continue
            if kind == TransferKind.SWAP_OUT:
                to, what = hosts[destination].ctypes.data, self._at(source, block_bytes)
            else:
                to, what = self._at(destination, block_bytes), hosts[source].ctypes.data
            self._runtime.copy(self._device, to, what, block_bytes)
        for source, destination in zip(copies.sources.tolist(), copies.destinations.tolist(), strict=True):
            self._runtime.copy(self._device, self._at(destination, block_bytes), self._at(source, block_bytes), block_bytes)

    def _at(self, block_id: int, block_bytes: int) -> int:
        return self.pointer + block_id * block_bytes


_GRANULARITY = 2 << 20  # the driver packs smaller allocations together, and a handle exposes the whole pack
_HEADROOM = 64 << 20

_generations = itertools.count(1)


class CudaArena:
    """An Arena of [num_bytes] bytes on a device, all zero at first. Raises OutOfMemory, CudaError."""

    def __init__(self, runtime: CudaRuntime, device: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._runtime, self._device = runtime, device
        try:
            self._bytes = DeviceBytes(runtime, device, runtime.allocate(device, -(-num_bytes // _GRANULARITY) * _GRANULARITY))
        except CudaError as error:
            if error.is_out_of_memory:
                raise OutOfMemory(f"{size(num_bytes)} could not be had on the device", on_device=True) from None
            raise
        try:
            self._bytes.clear(num_bytes)
            handle, offset = runtime.export(device, self._bytes.pointer)
            uuid = runtime.device_uuids()[device]
        except BaseException:
            runtime.free(device, self._bytes.pointer)
            raise
        self._handle = ArenaHandle(uuid, handle, offset, num_bytes, next(_generations))

    def fields(self) -> dict[str, object]:
        return self._handle.as_fields()

    def descriptors(self) -> list[int]:
        """None: the handle is enough to map the arena."""
        return []

    def read(self, first: int, num_bytes: int) -> bytes:
        return self._bytes.read(first, num_bytes)

    def write(self, first: int, data: bytes) -> None:
        self._bytes.write(first, data)

    def copy(self, copies: Copies, block_bytes: int, hosts: ByteArray | None, packing: HostPacking | None = None) -> None:
        self._bytes.copy(copies, block_bytes, hosts, packing)

    def close(self, *, is_mapped: bool = False) -> None:
        """Frees the memory, unless other processes map it: CUDA forbids that, so it is freed when this process ends."""
        if not is_mapped:
            self._runtime.free(self._device, self._bytes.pointer)


class PinnedArena(SharedMemoryArena):
    """A host tier's arena with pinned pages, which copies to and from the device use directly."""

    def __init__(self, runtime: CudaRuntime, device: int, num_bytes: int, descriptor: int | None = None) -> None:
        """descriptor: see SharedMemoryArena. Raises OutOfMemory, CudaError."""
        super().__init__(num_bytes, descriptor)
        self._runtime, self._device, self._pinned = runtime, device, self.array.ctypes.data
        try:
            runtime.register_host(device, self._pinned, num_bytes)
        except BaseException:
            super().close()
            raise

    def close(self, *, is_mapped: bool = False) -> None:
        """Unpins the pages and gives them back."""
        self._runtime.unregister_host(self._device, self._pinned)
        super().close(is_mapped=is_mapped)


class CudaMemory:
    """Allocates arenas on a CUDA device, those of further ranks on the next ones, and pinned host arenas.

    Raises CudaError where there is no such device.
    """

    def __init__(self, runtime: CudaRuntime, device: int) -> None:
        if device >= (count := len(runtime.device_uuids())):
            raise CudaError("device_uuids", f"{count} CUDA devices are visible")
        self._runtime, self._device = runtime, device

    def available_bytes(self) -> int:
        """Bytes of the device that arenas can have now."""
        return max(0, self._runtime.free_bytes(self._device) - _HEADROOM)

    def require(self, num_bytes: int, num_host_bytes: int) -> None:
        """Raises OutOfMemory where arenas of num_bytes and host tiers of num_host_bytes do not fit now."""
        if num_bytes > (available := self.available_bytes()):
            text = f"{size(num_bytes)} are wanted, {size(available)} are available on the device"
            raise OutOfMemory(text, on_device=True)
        memory_limit.require(num_host_bytes)

    def allocate(self, num_bytes: int, rank: int = 0) -> Arena:
        """On the device that is so many behind the first rank's. Raises OutOfMemory."""
        device, count = self._device + rank, len(self._runtime.device_uuids())
        if device >= count:
            raise OutOfMemory(f"rank {rank} is for device {device}, and {count} CUDA devices are visible")
        return CudaArena(self._runtime, device, num_bytes)

    def allocate_host(self, num_bytes: int) -> SharedMemoryArena:
        """Raises OutOfMemory."""
        return PinnedArena(self._runtime, self._device, num_bytes)
