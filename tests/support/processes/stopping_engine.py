"""An engine service that stops itself in the middle of its steps, as a signal from outside would at the worst moment.

`python -m tests.support.processes.stopping_engine --stop-every N --stop-seed S`, and the flags of an engine: of N calls of
its model about one stops the whole process, before the call reads anything or when it has read all. Half of the stops come
when the cache service has answered the next step already, after which nothing is sent before the tokens of this one are
there. The process that started it lets it go on.
"""

import dataclasses
import os
import random
import signal
import sys
import threading
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import torch

from kvkeeper.client.steps import StepResult
from kvkeeper.common.service.process import run
from kvkeeper.engine_service.__main__ import _until_stopped
from kvkeeper.engine_service.cache_session.kv_memory import KvMemory
from kvkeeper.engine_service.compute.model_runner import Runner
from kvkeeper.engine_service.compute.served_model import ServedModel, load_served_model
from kvkeeper.engine_service.config import EngineConfig, load_config
from kvkeeper.engine_service.preflight import check_start
from kvkeeper.engine_service.server import start_server
from kvkeeper.engine_service.values.batch import Batch
from kvkeeper.kernels.layout import KvLayout

_FIRST = 20  # calls before the first stop
_NEXT_ANSWER_S = 0.1  # for an answer that may have come already


class Stops:
    """When the process stops."""

    def __init__(self, every: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._every = every
        self._num_calls = 0
        self._answered = threading.Event()

    def maybe(self) -> None:
        """One of the moments. In the worker thread."""
        self._num_calls += 1
        if self._num_calls > _FIRST and self._rng.randrange(2 * self._every) == 0:
            if self._rng.random() < 0.5:
                self._answered.clear()
                self._answered.wait(_NEXT_ANSWER_S)
            os.kill(os.getpid(), signal.SIGSTOP)

    def watch(self) -> None:
        """Hear of each step that is answered."""
        step = KvMemory.step

        async def watched(memory: KvMemory, *args: Any) -> StepResult:
            answer = await step(memory, *args)
            self._answered.set()
            return answer

        KvMemory.step = watched  # type: ignore[method-assign,assignment]


class StoppingRunner:
    """A Runner on top of another."""

    def __init__(self, inner: Runner, stops: Stops) -> None:
        self._inner = inner
        self._stops = stops

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    @property
    def layout(self) -> KvLayout:
        return self._inner.layout

    def forward(self, batch: Batch) -> torch.Tensor:
        self._stops.maybe()
        logits = self._inner.forward(batch)
        self._stops.maybe()
        return logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._inner.copy_blocks(pairs)

    def synchronize(self) -> None:
        self._inner.synchronize()


def _stopping(model: ServedModel, stops: Stops) -> ServedModel:
    def make_runner(kv_view: torch.Tensor, layout: KvLayout) -> Runner:
        return StoppingRunner(model.make_runner(kv_view, layout), stops)

    return dataclasses.replace(model, make_runner=make_runner)


def main() -> int:
    argv = sys.argv[1:]
    numbers = []
    for flag in ("--stop-every", "--stop-seed"):
        place = argv.index(flag)
        numbers.append(int(argv[place + 1]))
        del argv[place : place + 2]
    stops = Stops(*numbers)
    stops.watch()

    def serve(config: EngineConfig) -> Coroutine[Any, Any, None]:
        return _until_stopped(partial(start_server, config, model=_stopping(load_served_model(config), stops)))

    return run("stopping engine", load_config, serve, argv, check_start)


if __name__ == "__main__":
    sys.exit(main())
