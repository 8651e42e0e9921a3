"""GraphApi: how launches are captured and replayed, and CudaGraphs, which does it with torch on a device, for some batch sizes.

A batch takes the next larger graph, and its padding costs little: a row without tokens reads nothing. So the steps between
sizes are of eight rows, and of sixteen where eight are few beside the others.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Graph(Protocol):
    """Launches that were captured. What the capture made is the graph's; of all other memory it has the address alone."""

    def replay(self) -> None: ...


class GraphApi(Protocol):
    """Captures what a function launches; the launches of the capture itself need not have an effect."""

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """The graph, and what `run` returned, whose tensors each replay writes anew."""


class CudaGraphs:
    """torch's graphs, which share one pool of memory: only one of them replays at a time, and each ends before the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """See GraphApi. Runs once before it captures, so that nothing is compiled, loaded or tuned while it captures."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads may call CUDA meanwhile; it is this thread's calls that the capture is strict about.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                made = run()
            self._pool = self._pool or graph.pool()
        return graph, made


_SMALL = (1, 2, 4)
_STEP, _WIDE_STEP = 8, 16
_WIDE_FROM = 128
MOST_ROWS = 512  # larger batches keep the device busy for longer than the host needs for a plain forward pass


def graph_sizes(most_rows: int) -> list[int]:
    """Sizes up to `most_rows`, at least 1, itself included, and never above MOST_ROWS. Ascending."""
    most = min(most_rows, MOST_ROWS)
    steps = [*_SMALL, *range(_STEP, _WIDE_FROM, _STEP), *range(_WIDE_FROM, most + 1, _WIDE_STEP)]
    return [size for size in steps if size < most] + [most]


def size_for(num_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending sizes that holds so many rows; None: none does."""
    place = bisect.bisect_left(sizes, num_rows)
    return sizes[place] if place < len(sizes) else None
