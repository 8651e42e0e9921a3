"""GraphApi: how launches are captured and replayed, and CudaGraphs, which does it with torch on a device."""

from collections.abc import Callable
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
