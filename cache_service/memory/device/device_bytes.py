"""DeviceBytes: device memory as the service reads, writes and copies it for clients without kernels, one call a block."""

import numpy as np

from kvkeeper.common.cuda.runtime import CudaRuntime

from ...core.values.copies import Copies
from ...core.values.types import TransferKind
from ..arena import ByteArray
from ..host_packing import HostPacking
from ..shared_memory import transfers_of


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
        for kind, source, destination in transfers_of(copies):
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
