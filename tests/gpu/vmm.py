"""A check whether device memory can be shared by CUDA's VMM descriptors: the second kind of handle, if the first is refused.

`python -m tests.gpu.vmm FD` is the importing process: it maps the memory of descriptor FD, adds one to its first byte, ends.
"""

import subprocess
import sys
from typing import Any

from tests.gpu.checks import Check

_SIZE = 8 << 20


def probe() -> Check:
    """Export, import in another process, write there, read here."""
    from cuda.bindings import driver

    driver_call(driver.cuInit(0))
    context = driver_call(driver.cuDevicePrimaryCtxRetain(0))
    driver_call(driver.cuCtxSetCurrent(context))
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    shape = driver.CUmemAllocationProp()
    shape.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    shape.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    shape.location.id = 0
    shape.requestedHandleTypes = kind
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity = driver_call(driver.cuMemGetAllocationGranularity(shape, minimum))
    handle = driver_call(driver.cuMemCreate(_SIZE, shape, 0))
    descriptor = int(driver_call(driver.cuMemExportToShareableHandle(handle, kind, 0)))
    pointer = _map(driver, handle)
    driver_call(driver.cuMemsetD8(pointer, 41, _SIZE))
    driver_call(driver.cuCtxSynchronize())
    command = [sys.executable, "-m", "tests.gpu.vmm", str(descriptor)]
    done = subprocess.run(command, pass_fds=[descriptor], capture_output=True, text=True, timeout=60)
    seen = bytearray(1)
    driver_call(driver.cuMemcpyDtoH(seen, pointer, 1))
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return Check("vmm_descriptor", seen[0] == 42, {"granularity_bytes": int(granularity)}, last[0])


def driver_call(result: tuple[Any, ...]) -> Any:
    """What a driver call answers behind its error code. Raises OSError."""
    error, *values = result
    if int(error):
        raise OSError(error.name)
    return values[0] if values else None


def _map(driver: Any, handle: Any) -> Any:
    pointer = driver_call(driver.cuMemAddressReserve(_SIZE, 0, 0, 0))
    driver_call(driver.cuMemMap(pointer, _SIZE, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    driver_call(driver.cuMemSetAccess(pointer, _SIZE, [access], 1))
    return pointer


def _import(descriptor: int) -> None:
    from cuda.bindings import driver

    driver_call(driver.cuInit(0))
    driver_call(driver.cuCtxSetCurrent(driver_call(driver.cuDevicePrimaryCtxRetain(0))))
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    pointer = _map(driver, driver_call(driver.cuMemImportFromShareableHandle(descriptor, kind)))
    seen = bytearray(1)
    driver_call(driver.cuMemcpyDtoH(seen, pointer, 1))
    driver_call(driver.cuMemsetD8(pointer, seen[0] + 1, 1))
    driver_call(driver.cuCtxSynchronize())


if __name__ == "__main__":
    _import(int(sys.argv[1]))
