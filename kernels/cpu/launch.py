"""Calls a compiled kernel with its arguments, in as many threads as torch computes with.

Owns the threads' side: the threads are those of the OpenMP library that torch itself runs on, so that two pools never wait for
each other on the same cores. Where that library is another than libgomp, kernels run in the calling thread. A call does not
hold Python's lock. While a program is recorded, a call is noted in it instead, and computes nothing: see program.py.
"""

import ctypes
import struct
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

import torch

from .compiled import kernel

_LEAST_WORK = 1 << 14  # elements that a kernel reads: with fewer, waking a second thread takes longer than the work
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class _Threads:
    """GOMP_parallel of torch's libgomp, and the addresses of the functions that threads ask for their share, and meet by."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.parallel = library.GOMP_parallel
        self.parallel.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
        self.parallel.restype = None
        functions = (library.omp_get_thread_num, library.omp_get_num_threads, library.GOMP_barrier)
        number, count, self.barrier = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        self.addresses = number, count


def _find_threads() -> _Threads | None:
    """The functions of the library that torch has loaded."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        try:
            return _Threads(ctypes.CDLL(str(path)))
        except (OSError, AttributeError):
            continue
    return None


THREADS = _find_threads()


def count_threads(work: int) -> int:
    """How many threads a kernel takes that reads about so many elements."""
    return 1 if THREADS is None or work < _LEAST_WORK else torch.get_num_threads()


class Recorder(Protocol):
    """What takes note of calls, which all threads share."""

    def add(self, address: int, arguments: bytes) -> None: ...


recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


class Launcher:
    """Calls one kernel. Its arguments, behind the two of the threads, have the types of `layout`, q and d as in struct.

    Behind them is what threads have taken of the work, from 0 on, where the kernel has them take it: kernel_parts.take_share.
    """

    def __init__(self, name: str, layout: str, find: Callable[[str, torch.dtype], int] = kernel) -> None:
        """find: the kernel's address, asked once for each dtype."""
        self._name, self._find, self._layout = name, find, struct.Struct(f"qq{layout}q")
        self._functions: dict[torch.dtype, tuple[int, Callable[[bytes], None]]] = {}

    def __call__(self, dtype: torch.dtype, work: int, *arguments: int | float) -> None:
        """Run it to its end. dtype: of what it computes on. work: about the elements that it reads."""
        found = self._functions.get(dtype)
        if found is None:
            address = self._find(self._name, dtype)
            found = self._functions[dtype] = address, KERNEL(address)
        address, function = found
        recording = recorder.get()
        num_threads = 1 if recording is not None else count_threads(work)
        if THREADS is None or (num_threads == 1 and recording is None):
            packed = self._layout.pack(0, 0, *arguments, 0)
        else:
            packed = self._layout.pack(*THREADS.addresses, *arguments, 0)
        if recording is not None:
            recording.add(address, packed)
        elif THREADS is None or num_threads == 1:
            function(packed)
        else:
            THREADS.parallel(address, packed, num_threads, 0)
