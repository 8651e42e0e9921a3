"""Peer: another process with CUDA memory that takes commands line by line, and is killed where a test needs that.

`python -m tests.gpu.peer [FOLDER]` is the other end: it reads one JSON call a line and answers one line. With a folder it works
on FakeCuda in it, and so rehearses the checks where there is no device.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kvkeeper.common.cuda.errors import CudaError
from kvkeeper.common.cuda.runtime import CudaRuntime, cuda_runtime
from tests.support.stand_ins.fake_cuda import FakeCuda

DEVICE = 0
CALL_S = 30.0  # of a call; the slowest one makes a context and clears 64 GiB


class PeerFailed(Exception):
    """A call failed in the peer; the text is its error."""


class Peer:
    """A process. Use it in a with statement."""

    def __init__(self, folder: Path | None) -> None:
        command = [sys.executable, "-m", "tests.gpu.peer", *([] if folder is None else [str(folder)])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def call(self, name: str, **arguments: object) -> Any:
        """Raises PeerFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"name": name, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed("the process ended") from None
        line, end = b"", time.monotonic() + CALL_S
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(end - time.monotonic(), 0))[0]:
                raise PeerFailed(f"{name} gave no answer within {CALL_S:.0f} s")
            if not (part := os.read(self._process.stdout.fileno(), 1 << 16)):
                raise PeerFailed("the process ended")
            line += part
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer["value"]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class _Calls:
    """What a peer can do; each method is a call."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime

    def allocate(self, num_bytes: int) -> int:
        pointer = self._runtime.allocate(DEVICE, num_bytes)
        self._runtime.clear(DEVICE, pointer, num_bytes)
        return pointer

    def free(self, pointer: int) -> None:
        self._runtime.free(DEVICE, pointer)

    def export(self, pointer: int) -> list[Any]:
        handle, offset = self._runtime.export(DEVICE, pointer)
        return [handle.hex(), offset]

    def open(self, handle: str) -> int:
        return self._runtime.open(DEVICE, bytes.fromhex(handle))

    def close(self, base: int) -> None:
        self._runtime.close(DEVICE, base)

    def write(self, pointer: int, data: str) -> None:
        raw = bytes.fromhex(data)
        buffer = ctypes.create_string_buffer(raw, len(raw))
        self._runtime.copy(DEVICE, pointer, ctypes.addressof(buffer), len(raw))

    def read(self, pointer: int, num_bytes: int) -> str:
        buffer = ctypes.create_string_buffer(num_bytes)
        self._runtime.copy(DEVICE, ctypes.addressof(buffer), pointer, num_bytes)
        return buffer.raw.hex()

    def free_bytes(self) -> int:
        return self._runtime.free_bytes(DEVICE)

    def queue_writes(self, pointer: int, num_bytes: int) -> None:
        """Begin to write other bytes all the time, for ever, with as many kernels queued as the device takes."""
        write = self._write_for_ever if isinstance(self._runtime, FakeCuda) else _queue_kernels
        begun = threading.Event()
        threading.Thread(target=write, args=(pointer, num_bytes, begun), daemon=True).start()
        if not begun.wait(CALL_S / 2):
            raise CudaError("queue_writes", "no write began")

    def _write_for_ever(self, pointer: int, num_bytes: int, begun: threading.Event) -> None:
        value = 0
        while True:
            time.sleep(0.001)
            value = (value + 1) % 256
            ctypes.memset(pointer, value, num_bytes)
            begun.set()


def _queue_kernels(pointer: int, num_bytes: int, begun: threading.Event) -> None:
    import torch

    from tests.gpu.spoil import tensor_at

    memory, factor = tensor_at(pointer, num_bytes), torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    while True:
        memory.add_(1)
        factor = (factor @ factor).clamp_(max=1)  # some 200 us, so that the queue is seconds long
        if torch.cuda.current_stream().query() is False:
            begun.set()


def main() -> None:
    """The other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    runtime = FakeCuda(Path(sys.argv[1]), f"peer-{os.getpid()}") if len(sys.argv) > 1 else cuda_runtime()
    calls = _Calls(runtime)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer: dict[str, Any] = {"value": getattr(calls, call.pop("name"))(**call)}
        except CudaError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
