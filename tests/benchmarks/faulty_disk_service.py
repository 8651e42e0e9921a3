"""`python -m tests.benchmarks.faulty_disk_service FILE FLAGS`: a cache service whose disk does as FILE's byte says.

Nothing else of the service is changed: what is replaced is the call that moves bytes between a slab and memory. FILE is shared
memory, so that a fault begins and ends while orders are running.
"""

import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from kvkeeper.cache_service.__main__ import main
from kvkeeper.cache_service.memory.disk import slab

ANSWERS, HANGS, LIES, IS_FULL, IS_GONE = range(5)
_LOOK_SECONDS = 0.02


def _make_faulty(state: mmap.mmap) -> None:
    really = slab._transfer
    never = threading.Event()

    def transfer(call: Callable[..., int], descriptor: int, buffers: list[memoryview], at: int) -> None:
        while state[0] == HANGS:
            never.wait(_LOOK_SECONDS)
        if state[0] == IS_GONE:
            raise OSError(errno.EIO, "gone")
        if state[0] == IS_FULL and call is os.pwritev:
            raise OSError(errno.ENOSPC, "full")
        really(call, descriptor, buffers, at)
        if state[0] == LIES and call is os.preadv:
            for buffer in buffers:
                buffer[len(buffer) // 2] ^= 1

    slab._transfer = transfer


if __name__ == "__main__":
    with Path(sys.argv[1]).open("r+b") as file:
        _make_faulty(mmap.mmap(file.fileno(), 1))
    sys.exit(main(sys.argv[2:]))
