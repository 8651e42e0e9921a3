"""Device memory that processes share by file descriptors, and that outlives its service: CUDA's virtual memory management.

Owns how such an arena is named to another process and mapped there, and the few calls of libcuda for it, by ctypes, each
raising CudaError. Only this module knows their structures; what else knows of such memory imports this module alone. Rules:
memory has a multiple of the driver's granularity; a mapping and a descriptor each keep it alive, also after the process that
made it has died; a descriptor is only named to the driver, and stays the caller's. The library is loaded with the first call:
a machine without a GPU does not need it. Tests put another library in its place, with functions of the same C signatures.

Not yet run on a device.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from dataclasses import asdict, dataclass
from typing import Any

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.handle import parse_counts, parse_uuid
from kvkeeper.common.cuda.imported import find_device
from kvkeeper.common.cuda.runtime import CudaRuntime

DESCRIPTOR_KIND = "cuda_vmm"
_LIBRARY = "libcuda.so.1"
_PINNED, _ON_DEVICE, _READ_WRITE, _LEAST = 1, 1, 3, 0  # type of memory, of location; access; the smaller granularity
_DESCRIPTOR = 1  # the type of handle: a POSIX file descriptor


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("gpu_direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32_metadata", c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemRelease": (c_uint64,),
}


def _libcuda() -> Any:
    """Raises CudaError."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        raise CudaError("import", f"{_LIBRARY} is not installed; it comes with NVIDIA's driver") from None


class VmmDriver:
    """The calls; all raise CudaError. Sizes are in bytes; a device is an index among this process's visible devices."""

    def __init__(self, library: Callable[[], Any] = _libcuda) -> None:
        self._open = library
        self._lock = threading.Lock()
        self._library: Any = None

    def whole(self, device: int, num_bytes: int) -> int:
        """The least size that memory for so many bytes can have."""
        granularity = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(_properties(device)), _LEAST)
        return -(-num_bytes // granularity.value) * granularity.value

    def make(self, device: int, num_bytes: int) -> tuple[int, int]:
        """New memory of a whole size: the pointer to it here, and a descriptor of it, which the caller closes."""
        handle, descriptor = c_uint64(), c_int(-1)
        self._call("cuMemCreate", byref(handle), num_bytes, byref(_properties(device)), 0)
        try:
            pointer = self._map(device, handle.value, num_bytes)
            try:
                self._call("cuMemExportToShareableHandle", byref(descriptor), handle.value, _DESCRIPTOR, 0)
            except CudaError:
                self.unmap(pointer, num_bytes)
                raise
        finally:
            self._call("cuMemRelease", handle.value)  # mapping and descriptor keep the memory
        return pointer, descriptor.value

    def map(self, device: int, descriptor: int, num_bytes: int) -> int:
        """The pointer to the memory of a descriptor, mapped here. num_bytes: a whole size, at most that of the memory."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), descriptor, _DESCRIPTOR)
        try:
            return self._map(device, handle.value, num_bytes)
        finally:
            self._call("cuMemRelease", handle.value)

    def unmap(self, pointer: int, num_bytes: int) -> None:
        """Undo the mapping. The device's work on it must be done."""
        self._call("cuMemUnmap", pointer, num_bytes)
        self._call("cuMemAddressFree", pointer, num_bytes)

    def _map(self, device: int, handle: int, num_bytes: int) -> int:
        pointer, access = c_uint64(), _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
        self._call("cuMemAddressReserve", byref(pointer), num_bytes, 0, 0, 0)
        try:
            self._call("cuMemMap", pointer.value, num_bytes, 0, handle, 0)
            try:
                self._call("cuMemSetAccess", pointer.value, num_bytes, byref(access), 1)
            except CudaError:
                self._call("cuMemUnmap", pointer.value, num_bytes)
                raise
        except CudaError:
            self._call("cuMemAddressFree", pointer.value, num_bytes)
            raise
        return pointer.value

    def _call(self, name: str, *arguments: Any) -> None:
        library = self._loaded()
        if result := getattr(library, name)(*arguments):
            raise CudaError(name, _error_name(library, result))

    def _loaded(self) -> Any:
        with self._lock:
            if self._library is None:
                library = self._open()
                for name, arguments in _SIGNATURES.items():
                    function = getattr(library, name)
                    function.argtypes, function.restype = arguments, c_int
                if result := library.cuInit(0):
                    raise CudaError("cuInit", _error_name(library, result))
                self._library = library
            return self._library


@dataclass(frozen=True, slots=True)
class DescribedArena:
    """An arena whose descriptor is sent beside the line. It is at the beginning of the memory.

    Attributes:
        device_uuid: as in ArenaHandle.
        num_bytes: of the arena.
        mapped_bytes: of the memory, what is mapped of it.
    """

    device_uuid: str
    num_bytes: int
    mapped_bytes: int

    def as_fields(self) -> dict[str, object]:
        """The attach socket's line, as values of JSON."""
        return {"kind": DESCRIPTOR_KIND, **asdict(self)}


def described_arena(fields: dict[str, object]) -> DescribedArena:
    """Raises ValueError for fields that as_fields does not make."""
    arena = DescribedArena(parse_uuid(fields), *parse_counts(fields, "num_bytes", "mapped_bytes"))
    if arena.num_bytes > arena.mapped_bytes:
        raise ValueError("mapped_bytes")
    return arena


class MappedArena:
    """An arena of another process, by a descriptor: mapped anew each time, so it needs no count of users.

    pointer, device: as of ImportedArena.
    """

    def __init__(self, runtime: CudaRuntime, driver: VmmDriver, arena: DescribedArena, descriptor: int, witness: int) -> None:
        """descriptor: stays the caller's. witness: a descriptor that is closed here once the memory is unmapped.

        Raises CudaError, with the witness closed, also for a device that this process does not see.
        """
        self._runtime, self._driver, self._witness = runtime, driver, witness
        self.num_bytes, self._mapped_bytes = arena.num_bytes, arena.mapped_bytes
        try:
            self.device = find_device(runtime, arena.device_uuid)
            runtime.synchronize(self.device)  # makes the context that the driver's calls want
            self.pointer = driver.map(self.device, descriptor, arena.mapped_bytes)
        except BaseException:
            os.close(witness)
            raise

    def close(self) -> None:
        """Wait for this process's work on the device, then unmap. Idempotent. Raises CudaError."""
        if self._witness == -1:
            return
        witness, self._witness = self._witness, -1
        try:
            self._runtime.synchronize(self.device)
            self._driver.unmap(self.pointer, self._mapped_bytes)
        finally:
            os.close(witness)


def _properties(device: int) -> _Properties:
    return _Properties(type=_PINNED, handle_types=_DESCRIPTOR, location=_Location(_ON_DEVICE, device))


def _error_name(library: Any, result: int) -> str:
    text = c_char_p()
    library.cuGetErrorName(result, byref(text))
    return text.value.decode() if text.value else f"error {result}"


_driver = VmmDriver()


def vmm_driver() -> VmmDriver:
    """The process's driver."""
    return _driver


def use_driver(driver: VmmDriver) -> None:
    """Put another driver in its place, before the first use; for tests."""
    global _driver
    _driver = driver
