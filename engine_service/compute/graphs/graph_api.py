"""GraphApi: how launches are captured and replayed; CudaGraphs, which does it with torch on a device; and with other ranks."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from ...model.split import Split

T = TypeVar("T")


class Graph(Protocol):
    """Launches that were captured. What the capture made is the graph's; of all other memory it has the address alone."""

    def replay(self) -> None: ...


class GraphApi(Protocol):
    """Captures what a function launches; the launches of the capture itself need not have an effect."""

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """The graph, and what `run` returned, whose tensors each replay writes anew."""


class NotCaptured(Exception):
    """One rank or another could not capture a step, which all of them know."""


class AgreedGraphs:
    """Captures of all ranks at once, of the same in the same order. What ranks do together is a part of the graph.

    NCCL wants a capture, and each replay of it, from all ranks or from none. So a step is captured if all ranks could.
    """

    def __init__(self, own: GraphApi, split: Split, device: torch.device) -> None:
        """own: captures on this rank, behind a run."""
        self._own, self._split, self._device = own, split, device

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """See GraphApi. Raises NotCaptured on all ranks; else the others are in the middle of the step that was run before."""
        has_run, failure, captured = False, None, None

        def counted() -> T:
            nonlocal has_run
            made = run()
            has_run = True
            return made

        try:
            captured = self._own.capture(counted)
        except Exception as error:
            if not has_run:
                raise
            failure = error
        could = torch.tensor([captured is not None], dtype=torch.int64, device=self._device)
        num_captured = int(self._split.together.add_up(could))
        if captured is None or num_captured < self._split.num_ranks:
            where = "another rank" if failure is None else f"this rank: {failure}"
            raise NotCaptured(f"a step could not be captured on {where}") from failure
        return captured


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
