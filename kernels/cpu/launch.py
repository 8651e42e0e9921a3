"""Calls a compiled kernel with its arguments, in as many threads as torch computes with.

Owns the threads' side: the threads are those of the OpenMP library that torch itself runs on, so that two pools never wait for
each other on the same cores. Where that library is another than libgomp, kernels run in the calling thread. A call does not
hold Python's lock.
"""

import ctypes
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from .compiled import kernel

_LEAST_WORK = 1 << 14  # elements that a kernel reads: with fewer, waking a second thread takes longer than the work
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class _Threads:
    """GOMP_parallel of torch's libgomp, and the addresses of the two functions that a thread's share follows from."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.parallel = library.GOMP_parallel
        self.parallel.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
        self.parallel.restype = None
        functions = (library.omp_get_thread_num, library.omp_get_num_threads)
        self.addresses = tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)


def _find_threads() -> _Threads | None:
    """The functions of the library that torch has loaded."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        try:
            return _Threads(ctypes.CDLL(str(path)))
        except (OSError, AttributeError):
            continue
    return None


_threads = _find_threads()


class Launcher:
    """Calls one kernel. Its arguments, behind the two of the threads, have the types of `layout`, q and d as in struct."""

    def __init__(self, name: str, layout: str, find: Callable[[], int] | None = None) -> None:
        """find: the kernel's address, where compiled.py does not know it; asked once."""
        self._find, self._layout = find or partial(kernel, name), struct.Struct("qq" + layout)
        self._address = 0

    def __call__(self, work: int, *arguments: int | float) -> None:
        """Run it to its end. work: about the elements that it reads."""
        if not self._address:
            self._address = self._find()
            self._function = _KERNEL(self._address)
        num_threads = 1 if _threads is None or work < _LEAST_WORK else torch.get_num_threads()
        if num_threads == 1 or _threads is None:
            self._function(self._layout.pack(0, 0, *arguments))
        else:
            _threads.parallel(self._address, self._layout.pack(*_threads.addresses, *arguments), num_threads, 0)
