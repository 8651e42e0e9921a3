"""CudaRuntime: the few calls of the CUDA runtime that kvkeeper makes, each raising CudaError.

Only this module uses cuda-bindings, NVIDIA's own package, and imports it with the first call: a machine without a GPU does not
need it. Pointers are plain integers. The runtime keeps a current device per thread, so every call names its device and makes it
current first. The first call creates the process's context on the device, which takes hundreds of megabytes of device memory.
Tests put another implementation in its place.
"""

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.service.extras import install_command

HANDLE_BYTES = 64
MOST_COPIES = 4096  # of one call: drivers have hung with ten times as many


class CudaRuntime(Protocol):
    """The calls; all raise CudaError. Sizes are in bytes; a device is an index among this process's visible devices."""

    def device_uuids(self) -> list[str]:
        """The visible devices, 32 hexadecimal digits each."""

    def allocate(self, device: int, num_bytes: int) -> int:
        """A separate allocation, so that its handle shows nothing else."""

    def free(self, device: int, pointer: int) -> None: ...

    def clear(self, device: int, pointer: int, num_bytes: int) -> None:
        """Zeros; done when it returns."""

    def export(self, device: int, pointer: int) -> tuple[bytes, int]:
        """The allocation's handle [HANDLE_BYTES] for other processes, and the pointer's offset in the memory that it opens."""

    def open(self, device: int, handle: bytes) -> int:
        """The pointer to another process's allocation, mapped here. Once per process and handle, see imported.py."""

    def close(self, device: int, base: int) -> None:
        """Undo open."""

    def copy(self, device: int, destination: int, source: int, num_bytes: int) -> None:
        """Copies between device, imported and host memory, or within one where the ranges do not overlap; done on return."""

    def copy_many(
        self, device: int, stream: int, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Copies that do not depend on each other, in one call and in the stream's order; not done on return.

        stream: a stream's handle, not the default stream's. At most MOST_COPIES at once.
        """

    def register_host(self, device: int, pointer: int, num_bytes: int) -> None:
        """Pin host memory that is mapped here, for every device: copies to and from it then run at the bus's speed."""

    def unregister_host(self, device: int, pointer: int) -> None: ...

    def free_bytes(self, device: int) -> int:
        """Device memory that can be allocated now."""

    def synchronize(self, device: int) -> None:
        """Waits until all work of this process on the device is done."""


class BoundRuntime:
    """CudaRuntime on cuda-bindings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._driver: ModuleType | None = None
        self._runtime: ModuleType | None = None

    def device_uuids(self) -> list[str]:
        self._load()
        count = self._call("cudaGetDeviceCount")
        properties = [self._call("cudaGetDeviceProperties", device) for device in range(count)]
        return [bytes(shown.uuid.bytes).hex() for shown in properties]

    def allocate(self, device: int, num_bytes: int) -> int:
        return int(self._on(device, "cudaMalloc", num_bytes))

    def free(self, device: int, pointer: int) -> None:
        self._on(device, "cudaFree", pointer)

    def clear(self, device: int, pointer: int, num_bytes: int) -> None:
        self._on(device, "cudaMemset", pointer, 0, num_bytes)
        self.synchronize(device)  # a memset of device memory returns before it is done

    def export(self, device: int, pointer: int) -> tuple[bytes, int]:
        handle = self._on(device, "cudaIpcGetMemHandle", pointer)
        assert self._driver is not None
        result, base, _ = self._driver.cuMemGetAddressRange(pointer)
        if int(result):
            raise CudaError("cuMemGetAddressRange", result.name)
        return bytes(handle.reserved), pointer - int(base)

    def open(self, device: int, handle: bytes) -> int:
        runtime = self._load()
        opaque = runtime.cudaIpcMemHandle_t()
        opaque.reserved = handle
        return int(self._on(device, "cudaIpcOpenMemHandle", opaque, runtime.cudaIpcMemLazyEnablePeerAccess))

    def close(self, device: int, base: int) -> None:
        self._on(device, "cudaIpcCloseMemHandle", base)

    def copy(self, device: int, destination: int, source: int, num_bytes: int) -> None:
        kind = self._load().cudaMemcpyKind.cudaMemcpyDefault  # the kind of memory follows from the pointers
        self._on(device, "cudaMemcpy", destination, source, num_bytes, kind)
        self.synchronize(device)  # a copy within the device returns before it is done

    def copy_many(
        self, device: int, stream: int, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> None:
        runtime, count = self._load(), len(sizes)
        assert 0 < count <= MOST_COPIES
        if not hasattr(runtime, "cudaMemcpyBatchAsync"):
            raise CudaError("cudaMemcpyBatchAsync", "cudaErrorNotSupported")
        attributes = runtime.cudaMemcpyAttributes()
        # What is read may have been written by work before it in the stream.
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        pointers = list(destinations), list(sources), list(sizes)
        self._on(device, "cudaMemcpyBatchAsync", *pointers, count, [attributes], [0], 1, stream)

    def register_host(self, device: int, pointer: int, num_bytes: int) -> None:
        self._on(device, "cudaHostRegister", pointer, num_bytes, self._load().cudaHostRegisterPortable)

    def unregister_host(self, device: int, pointer: int) -> None:
        self._on(device, "cudaHostUnregister", pointer)

    def free_bytes(self, device: int) -> int:
        free, _ = self._on(device, "cudaMemGetInfo")
        return int(free)

    def synchronize(self, device: int) -> None:
        self._on(device, "cudaDeviceSynchronize")

    def _on(self, device: int, call: str, *arguments: Any) -> Any:
        self._load()
        self._call("cudaSetDevice", device)
        return self._call(call, *arguments)

    def _call(self, call: str, *arguments: Any) -> Any:
        """The call's answer without its error code: nothing, one value, or a tuple."""
        error, *values = getattr(self._runtime, call)(*arguments)
        if int(error):
            raise CudaError(call, error.name)
        return values[0] if len(values) == 1 else tuple(values)

    def _load(self) -> ModuleType:
        with self._lock:
            if self._runtime is None:
                try:
                    from cuda.bindings import driver, runtime
                except ImportError:
                    raise CudaError("import", f"cuda-bindings is not installed; {install_command('cuda')}") from None
                self._driver, self._runtime = driver, runtime
            return self._runtime


_bound: CudaRuntime = BoundRuntime()


def cuda_runtime() -> CudaRuntime:
    """The process's runtime."""
    return _bound


def use_runtime(runtime: CudaRuntime) -> None:
    """Put another runtime in its place, before the first use; for tests."""
    global _bound
    _bound = runtime
