"""Checks whether device memory outlives its process by descriptors: what `kvkeeper hold` and `--hold` stand on.

`python -m tests.gpu.vmm FD [dry]` is the process that makes the memory: it fills it, sends its descriptor over socket FD, and
waits to be killed.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.runtime import CudaRuntime, cuda_runtime
from kvkeeper.common.cuda.vmm import VmmDriver, vmm_driver
from tests.gpu.checks import Check
from tests.gpu.peer import CALL_S
from tests.support.stand_ins.fake_cuda import FakeCuda
from tests.support.stand_ins.fake_libcuda import FakeLibcuda

_SIZE = 8 << 20


def run(is_dry: bool) -> Iterator[Check]:
    """All of it in one go; the first call that fails is told."""
    try:
        yield _maker_killed(*_device(is_dry), is_dry)
    except (CudaError, OSError, ValueError) as error:
        yield Check("vmm_maker_killed", False if is_dry else None, note=f"refused: {error}")


def _device(is_dry: bool) -> tuple[CudaRuntime, VmmDriver]:
    library = FakeLibcuda()
    return (FakeCuda(Path(), "vmm"), VmmDriver(lambda: library)) if is_dry else (cuda_runtime(), vmm_driver())


def _maker_killed(runtime: CudaRuntime, driver: VmmDriver, is_dry: bool) -> Check:
    """The descriptor alone keeps the bytes, two mappings made after the maker's death share them, and closing frees them."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.gpu.vmm", str(theirs.fileno()), *(["dry"] if is_dry else [])]
    maker = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        with ours:
            ours.settimeout(CALL_S)
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    finally:
        maker.send_signal(signal.SIGKILL)
        maker.wait()
    if not descriptors:
        raise ValueError("the process that makes the memory ended")
    (descriptor,) = descriptors
    before = runtime.free_bytes(0)
    began = time.perf_counter()
    pointers = [driver.map(0, descriptor, _SIZE) for _ in range(2)]
    map_ms = (time.perf_counter() - began) * 1000 / 2
    seen = [_byte(runtime, pointers[0], place) for place in (0, _SIZE - 1)]
    runtime.clear(0, pointers[0], 1)
    shared = _byte(runtime, pointers[1], 0) == 0
    runtime.synchronize(0)
    for pointer in pointers:
        driver.unmap(pointer, _SIZE)
    kept = runtime.free_bytes(0)
    os.close(descriptor)
    figures = {"map_ms": map_ms, "granularity_bytes": driver.whole(0, 1), "bytes_back_at_close": runtime.free_bytes(0) - kept}
    note = "" if is_dry or kept <= before else "unmapping alone gave memory back"
    return Check("vmm_maker_killed", seen == [41, 41] and shared, figures, note)


def _byte(runtime: CudaRuntime, pointer: int, place: int) -> int:
    found = np.zeros(1, np.uint8)
    runtime.copy(0, found.ctypes.data, pointer + place, 1)
    return int(found[0])


def _make(connection: socket.socket, is_dry: bool) -> None:
    runtime, driver = _device(is_dry)
    runtime.synchronize(0)  # makes the context
    pointer, descriptor = driver.make(0, _SIZE)
    filled = np.full(_SIZE, 41, np.uint8)
    runtime.copy(0, pointer, filled.ctypes.data, _SIZE)
    socket.send_fds(connection, [b"\0"], [descriptor])
    signal.pause()


if __name__ == "__main__":
    _make(socket.socket(fileno=int(sys.argv[1])), "dry" in sys.argv)
