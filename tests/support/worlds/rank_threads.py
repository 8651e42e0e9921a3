"""Ranks of a model as threads of this process, which come together here or over gloo: the arithmetic without the processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from kvkeeper.engine_service.model.split import Split
from kvkeeper.engine_service.ranks.meeting import Meeting

T = TypeVar("T")
_DEADLINE_S = 60.0


class InThreads:
    """What ranks do together, where each is a thread. num_bytes: gathered of this rank. num_shared: so often."""

    def __init__(self, rank: int, parts: list[torch.Tensor], meeting: threading.Barrier) -> None:
        self._rank, self._parts, self._meeting = rank, parts, meeting
        self.num_bytes = self.num_shared = 0

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        return self._together(part).sum(0)

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        self.num_bytes += part.nbytes
        parts = self._together(part)
        return parts if self._rank == 0 else None

    def share(self, given: torch.Tensor) -> torch.Tensor:
        self.num_shared += 1
        return self._together(given)[0]

    def _together(self, part: torch.Tensor) -> torch.Tensor:
        self._parts[self._rank] = part
        self._meeting.wait()
        assert len({(each.shape, each.dtype) for each in self._parts}) == 1, "all ranks have the same"
        found = torch.stack(self._parts)
        self._meeting.wait()
        return found


def on_ranks(num_ranks: int, work: Callable[[Split], T]) -> list[T]:
    """What the work gives on each rank. Where one fails, the others do, too."""
    meeting = threading.Barrier(num_ranks, timeout=_DEADLINE_S)
    parts: list[torch.Tensor] = [torch.empty(0)] * num_ranks

    def run(rank: int) -> T:
        try:
            return work(Split(rank, num_ranks, InThreads(rank, parts, meeting)))
        except BaseException:
            meeting.abort()
            raise

    return _in_threads(num_ranks, run)


def over_gloo(num_ranks: int, store: Path, work: Callable[[Split], T]) -> list[T]:
    """The same, of ranks that meet as processes do."""

    def run(rank: int) -> T:
        meeting = Meeting(num_ranks)
        meeting.join(store, rank, torch.device("cpu"), _DEADLINE_S)
        try:
            return work(Split(rank, num_ranks, meeting))
        finally:
            meeting.leave()

    return _in_threads(num_ranks, run)


def _in_threads(num_ranks: int, run: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(num_ranks) as threads:
        return [each.result() for each in [threads.submit(run, rank) for rank in range(num_ranks)]]
