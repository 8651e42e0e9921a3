"""FakeLibcuda: libcuda's virtual memory management on memfds, as functions with the C signatures of cuda.h.

One object is one process. It keeps the rules that are easily broken: sizes are multiples of the granularity; memory is only
mapped into an address range that was reserved, and only reachable once access was set; a range cannot be freed while something
is mapped there; a released handle is none, while its mappings and descriptors keep the memory, also when the process that made
it has died; descriptors of anything else are refused. The structures are declared here anew, from the header.
"""

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

GRANULARITY = 2 << 20
_INVALID_VALUE, _OUT_OF_MEMORY, _NOT_INITIALIZED, _INVALID_HANDLE, _NOT_PERMITTED = 1, 2, 3, 400, 800
_NAMES = {
    _INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    _OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
    _NOT_INITIALIZED: b"CUDA_ERROR_NOT_INITIALIZED",
    _INVALID_HANDLE: b"CUDA_ERROR_INVALID_HANDLE",
    _NOT_PERMITTED: b"CUDA_ERROR_NOT_PERMITTED",
}
_MEMORY = "fake-device-memory"
_FIXED, _ANONYMOUS, _SHARED, _PRIVATE = 0x10, 0x20, 1, 2
_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long)
_libc.munmap.argtypes = (c_void_p, c_size_t)
_libc.mprotect.argtypes = (c_void_p, c_size_t, c_int)


class Properties(ctypes.Structure):
    """CUmemAllocationProp, 32 bytes."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location_type", c_int),
        ("location_id", c_int),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc, 12 bytes."""

    _fields_ = (("location_type", c_int), ("location_id", c_int), ("flags", c_int))


assert (ctypes.sizeof(Properties), ctypes.sizeof(Access)) == (32, 12)


class FakeLibcuda:
    """A library with one device. capacity: bytes that this process may make; fail_in: name of a call that fails next."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.fail_in = ""
        self.handles: dict[int, int] = {}  # descriptors, by handle
        self.reserved: dict[int, int] = {}  # sizes, by address
        self.mapped: dict[int, int] = {}  # sizes, by address
        self._made: set[int] = set()  # handles that were not imported
        self._numbers = itertools.count(1000)
        self._is_ready = False
        self._functions = [self._offer(name, *arguments) for name, arguments in _SIGNATURES.items()]

    def _offer(self, name: str, *arguments: Any) -> Any:
        implementation: Callable[..., int] = getattr(self, f"_{name}")

        def guarded(*values: Any) -> int:
            if self.fail_in == name:
                self.fail_in = ""
                return _NOT_PERMITTED
            if not self._is_ready and name not in ("cuInit", "cuGetErrorName"):
                return _NOT_INITIALIZED
            return implementation(*values)

        function = CFUNCTYPE(c_int, *arguments)(guarded)
        setattr(self, name, function)
        return function

    def _cuInit(self, flags: int) -> int:
        self._is_ready = flags == 0
        return 0 if self._is_ready else _INVALID_VALUE

    def _cuGetErrorName(self, error: int, name: Any) -> int:
        if error not in _NAMES:
            return _INVALID_VALUE
        name[0] = _NAMES[error]
        return 0

    def _cuMemGetAllocationGranularity(self, granularity: Any, properties: Any, option: int) -> int:
        granularity[0] = GRANULARITY
        return 0 if _is_sound(properties[0]) and option in (0, 1) else _INVALID_VALUE

    def _cuMemCreate(self, handle: Any, num_bytes: int, properties: Any, flags: int) -> int:
        if not _is_sound(properties[0]) or num_bytes <= 0 or num_bytes % GRANULARITY or flags:
            return _INVALID_VALUE
        if num_bytes > self.capacity:
            return _OUT_OF_MEMORY
        descriptor = os.memfd_create(_MEMORY, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        with mmap.mmap(descriptor, num_bytes) as content:
            content[:] = b"\xa5" * num_bytes  # what was there before
        handle[0] = self._named(descriptor)
        self._made.add(handle[0])
        self.capacity -= num_bytes
        return 0

    def _cuMemExportToShareableHandle(self, shareable: int, handle: int, kind: int, flags: int) -> int:
        if handle not in self._made or kind != 1 or flags:
            return _INVALID_VALUE
        c_int.from_address(shareable).value = os.dup(self.handles[handle])
        return 0

    def _cuMemImportFromShareableHandle(self, handle: Any, shareable: int | None, kind: int) -> int:
        link = f"/proc/self/fd/{shareable or 0}"
        if kind != 1 or not os.path.exists(link) or not os.readlink(link).startswith(f"/memfd:{_MEMORY}"):
            return _INVALID_VALUE
        handle[0] = self._named(os.dup(shareable or 0))
        return 0

    def _cuMemAddressReserve(self, pointer: Any, num_bytes: int, alignment: int, wanted: int, flags: int) -> int:
        if num_bytes <= 0 or num_bytes % GRANULARITY or alignment or wanted or flags:
            return _INVALID_VALUE
        pointer[0] = _mmap(None, num_bytes, _PRIVATE | _ANONYMOUS, -1)
        self.reserved[pointer[0]] = num_bytes
        return 0

    def _cuMemMap(self, pointer: int, num_bytes: int, offset: int, handle: int, flags: int) -> int:
        if handle not in self.handles:
            return _INVALID_HANDLE
        descriptor = self.handles[handle]
        is_taken = self.reserved.get(pointer) != num_bytes or pointer in self.mapped
        if is_taken or offset or flags or os.fstat(descriptor).st_size < num_bytes:
            return _INVALID_VALUE
        _mmap(pointer, num_bytes, _SHARED | _FIXED, descriptor)
        self.mapped[pointer] = num_bytes
        return 0

    def _cuMemSetAccess(self, pointer: int, num_bytes: int, accesses: Any, count: int) -> int:
        access = accesses[0]
        is_whole = self.mapped.get(pointer) == num_bytes and count == 1
        if not is_whole or (access.location_type, access.location_id, access.flags) != (1, 0, 3):
            return _INVALID_VALUE
        return 0 if _libc.mprotect(pointer, num_bytes, _READ_WRITE) == 0 else _INVALID_VALUE

    def _cuMemUnmap(self, pointer: int, num_bytes: int) -> int:
        if self.mapped.get(pointer) != num_bytes:
            return _INVALID_VALUE
        del self.mapped[pointer]
        _mmap(pointer, num_bytes, _PRIVATE | _ANONYMOUS | _FIXED, -1)
        return 0

    def _cuMemAddressFree(self, pointer: int, num_bytes: int) -> int:
        if self.reserved.get(pointer) != num_bytes or pointer in self.mapped:
            return _INVALID_VALUE
        del self.reserved[pointer]
        _libc.munmap(pointer, num_bytes)
        return 0

    def _cuMemRelease(self, handle: int) -> int:
        if handle not in self.handles:
            return _INVALID_HANDLE
        os.close(self.handles.pop(handle))
        self._made.discard(handle)
        return 0

    def _named(self, descriptor: int) -> int:
        number = next(self._numbers)
        self.handles[number] = descriptor
        return number


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(Properties), c_uint64),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemRelease": (c_uint64,),
}


def num_device_memories(process: int) -> int:
    """Descriptors of device memory that a process has open."""
    links = (_link(path) for path in Path(f"/proc/{process}/fd").iterdir())
    return sum(link.startswith(f"/memfd:{_MEMORY}") for link in links)


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed meanwhile
        return ""


def _is_sound(properties: Properties) -> bool:
    of_device = (properties.type, properties.location_type, properties.location_id) == (1, 1, 0)
    return of_device and properties.requestedHandleTypes == 1 and not any(properties.allocFlags)


def _mmap(pointer: int | None, num_bytes: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(pointer, num_bytes, _NONE, flags, descriptor, 0)
    assert found not in (None, c_void_p(-1).value), "no address space"
    return int(found)
