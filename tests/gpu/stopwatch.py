"""Stopwatch: the device's time for a call, by the usual method: cold L2, random data, medians, and ceilings.

Ceilings are this machine's own, measured in the same run: what a kernel is held against is never a data sheet.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_COLD_BYTES = 256 << 20  # more than any L2


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes a second of reading, and of copying (read and written bytes together); multiply-adds of bf16 as FLOP a second."""

    read: float
    copy: float
    matmul: float


class Stopwatch:
    """device is "cuda", or "cpu" for a rehearsal, where times mean nothing."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._cold = torch.empty(_COLD_BYTES if device == "cuda" else 1, dtype=torch.uint8, device=device)

    def seconds(self, work: Callable[[], object], *, runs: int = 20) -> float:
        """Median over runs, each after two to warm up and with nothing of its data in the caches."""
        work()
        work()
        return statistics.median(self._once(work) for _ in range(runs))

    def _once(self, work: Callable[[], object]) -> float:
        self._cold.zero_()
        if self.device != "cuda":
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1000

    def in_graph(self, work: Callable[[], object], *, calls: int = 10, runs: int = 7) -> float:
        """Seconds a call of several that are captured in a row: the device's time, without the host's gaps between launches.

        What is read more than once stays in L2 if it fits there. On a CPU: as seconds.
        """
        if self.device != "cuda":
            return self.seconds(work, runs=runs)
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                work()
        return statistics.median(self._once(graph.replay) for _ in range(runs)) / calls

    def ceilings(self) -> Ceilings:
        """What this device can do at best."""
        size, edge = (1 << 30, 8192) if self.device == "cuda" else (1 << 20, 64)
        source = torch.randn(size, device=self.device, dtype=torch.bfloat16)
        target, left = torch.empty_like(source), torch.randn(edge, edge, device=self.device, dtype=torch.bfloat16)
        right = torch.randn_like(left)
        copy = 2 * source.nbytes / self.seconds(lambda: target.copy_(source), runs=5)
        # A reduction of torch's may be slower than the memory, and reading is no slower than a copy, which also writes.
        read = max(source.nbytes / self.seconds(lambda: source.view(torch.int64).amax(), runs=5), copy)
        return Ceilings(read, copy, 2 * edge**3 / self.seconds(lambda: left @ right, runs=5))
