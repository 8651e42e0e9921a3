"""ObeyingRanks: the ranks of a model as threads of this process, each with an arena of its own, that obey as rank processes do.

The first one is the test's: what RankedRunner has the others do, they do in the order in which it is sent.
"""

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch

from kvkeeper.engine_service.compute.model_runner import ModelRunner
from kvkeeper.engine_service.model.split import Split
from kvkeeper.engine_service.ranks.messages import Kind, RankLost
from kvkeeper.engine_service.ranks.rank_process import RankProcess
from tests.support.worlds.rank_threads import InThreads

_DEADLINE_S = 60.0


class ObeyingRanks:
    """Stands for Ranks. messages: all that were sent, to each of the others. together: of each rank."""

    def __init__(self, num_ranks: int, make_runner: Callable[[Split], ModelRunner]) -> None:
        self._meeting = threading.Barrier(num_ranks, timeout=_DEADLINE_S)
        parts: list[torch.Tensor] = [torch.empty(0)] * num_ranks
        self.together = [InThreads(rank, parts, self._meeting) for rank in range(num_ranks)]
        self.first = Split(0, num_ranks, self.together[0])
        self.messages: list[tuple[Kind, bytes]] = []
        self.runners = [make_runner(Split(rank, num_ranks, self.together[rank])) for rank in range(1, num_ranks)]
        self._told: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in self.runners]
        self._heard: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in self.runners]
        self._threads = [
            threading.Thread(target=self._obey, args=each, daemon=True)
            for each in zip(self.runners, self._told, self._heard, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def send_all(self, kind: Kind, body: bytes = b"") -> None:
        self.messages.append((kind, body))
        for told in self._told:
            told.put((kind, body))

    def hear(self) -> list[bytearray]:
        found = [heard.get(timeout=_DEADLINE_S) for heard in self._heard]
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found

    def lose(self, why: str, *, is_ours: bool) -> RankLost:
        self.stop()
        return RankLost(why)

    def stop(self) -> None:
        self._meeting.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for told in self._told:
            told.put(None)
        if error is not None:
            self.stop()
        for thread in self._threads:
            thread.join(_DEADLINE_S)

    def _obey(self, runner: ModelRunner, told: "queue.SimpleQueue[Any]", heard: "queue.SimpleQueue[Any]") -> None:
        rank = RankProcess.__new__(RankProcess)
        rank._pipe = SimpleNamespace(send=lambda kind, body=b"": heard.put(bytearray(body)))  # type: ignore[assignment]
        rank._failed = []
        mapped: Any = SimpleNamespace(runner=runner, mover=SimpleNamespace(make_ready=lambda: None))
        while (message := told.get()) is not None:
            try:
                rank._step(message[0], bytearray(message[1]), mapped)
            except BaseException as error:
                self._meeting.abort()
                heard.put(error)
                return
