"""Ranks of a model as threads of this process, which add up what each has: the arithmetic without the processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from kvkeeper.engine_service.model.split import Split

T = TypeVar("T")
_DEADLINE_S = 60.0


def on_ranks(num_ranks: int, work: Callable[[Split], T]) -> list[T]:
    """What the work gives on each rank. Where one fails, the others do, too."""
    meeting = threading.Barrier(num_ranks, timeout=_DEADLINE_S)
    parts: list[torch.Tensor] = [torch.empty(0)] * num_ranks

    def run(rank: int) -> T:
        def add_up(part: torch.Tensor) -> torch.Tensor:
            parts[rank] = part
            meeting.wait()
            assert len({each.shape for each in parts}) == 1, "all ranks add up the same"
            total = torch.stack(parts).sum(0)
            meeting.wait()
            return total

        try:
            return work(Split(rank, num_ranks, add_up))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        return [each.result() for each in [threads.submit(run, rank) for rank in range(num_ranks)]]
