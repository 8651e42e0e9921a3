"""Rows of numbers, one per sequence, as long as the longest sequence may get and with memory only where they are written.

So the longest length costs address space: a model with 131,072 positions takes no more of the machine for short sequences than
one with 4,096. Pure: the core of the cache and the scheduler of the engine keep their columns in such rows.
"""

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

_LARGE = 4 << 20
_DENSE_ROW = 32 << 10  # bytes; of longer rows most is never written
_MAP_NORESERVE = 0x4000  # of Linux, which Python does not name: more may be mapped than the machine has


def untouched(num_rows: int, num_columns: int) -> npt.NDArray[np.int32]:
    """[num_rows, num_columns] zeros that take memory only where they are written, and give it all back.

    np.zeros does so only while the allocator maps such sizes; once an array of a pool that is gone was freed, it writes the
    zeros into what it kept of it. Large pages for large arrays, as numpy has them: a step touches every row. But none for long
    rows: a short sequence would take a large page of each, 2 MiB in place of 4 KiB.
    """
    row_bytes = num_columns * np.dtype(np.int32).itemsize
    size = num_rows * row_bytes
    if not size:
        return np.zeros((num_rows, num_columns), np.int32)  # a mapping has a byte or more
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    if size >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a hint: a kernel without such pages refuses it, and so may a container
            memory.madvise(mmap.MADV_HUGEPAGE if row_bytes <= _DENSE_ROW else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32).reshape(num_rows, num_columns)
