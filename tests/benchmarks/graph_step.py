"""The host's part of a captured decode step, in Python and torch: filling the inputs, the replay, drawing, reading the tokens.

What a device would run is stubbed: a replay does nothing, and the kernel that draws answers zeros. The vocabulary is small, so
that little but their launch is left of the other operations, and torch has one thread. Penalised sequences grow by a token a
step, as they do.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TypeVar
from unittest import mock

import numpy as np
import torch

from kvkeeper.engine_service.compute import sampler
from kvkeeper.engine_service.compute.device.device_queue import HostQueue
from kvkeeper.engine_service.compute.device.token_counts import LastTokens, TokenCounts
from kvkeeper.engine_service.compute.graphs.graph_api import Graph
from kvkeeper.engine_service.compute.graphs.graphed_steps import StepShape, capture_steps
from kvkeeper.engine_service.compute.model_runner import ModelRunner
from kvkeeper.engine_service.compute.step_compute import StepCompute, StepRows
from kvkeeper.engine_service.scheduler.plan import Work
from kvkeeper.engine_service.values.sampling_params import (
    GREEDY,
    LIKELIEST,
    PenalisedRows,
    PlainDraws,
    SamplingParams,
    SamplingRow,
)
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.layout import KvLayout
from kvkeeper.kernels.scratch import Scratch
from tests.support.worlds.batches import ScheduledRow, build_batch, decode_work

_BLOCK_SIZE, _CONTEXT, _WIDTH, _VOCAB = 16, 300, 512, 512
_NUM_WARM_STEPS, _NUM_STEPS = 20, 400
T = TypeVar("T")
_DRAWS = {
    "likeliest": GREEDY,  # as the loop has them where nothing else is asked of a step
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=0.7, top_p=0.9),
    "penalised": SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1),
}


class _NoGraphs:
    """A GraphApi whose replays do nothing."""

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        return self, run()

    def replay(self) -> None:
        pass


class _Runner(ModelRunner):
    """The part of ModelRunner that a captured decode goes through."""

    def __init__(self, shape: StepShape) -> None:
        layout = KvLayout(1, 1, 64, torch.float32, _BLOCK_SIZE)
        self._layout, self._kv_view = layout, torch.empty(0)
        self.queue, self.last_tokens = HostQueue(), LastTokens(torch.device("cpu"))
        self.last_tokens.fix(shape.most_rows + 1)
        device = torch.device("cpu")
        self.counts = TokenCounts(shape.most_rows, shape.vocab_size, shape.num_positions, device)
        self.graphed = capture_steps(
            _logits, shape, device, _NoGraphs(), self.queue, self.last_tokens, self.counts, progress=False
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass

    def synchronize(self) -> None:
        pass


def figures() -> Iterator[dict[str, object]]:
    torch.set_num_threads(1)
    compiled.switch(on=compiled.is_installed())
    shape = StepShape(256, _WIDTH, _BLOCK_SIZE, _WIDTH * _BLOCK_SIZE, _VOCAB)
    with torch.inference_mode():
        runner = _Runner(shape)
    compute = StepCompute(runner)
    for num_rows in (1, 16, 64, 256):
        work = _work(num_rows)
        assert work.batch is not None
        inputs = _median_us(partial(runner.forward, work.batch))
        for name, params in _DRAWS.items():
            how = _likeliest(num_rows) if name == "likeliest" else _columns(params, num_rows)
            with mock.patch.object(sampler, "sample_rows", lambda logits, *_: torch.zeros(len(logits), dtype=torch.int64)):
                whole = _median_us(partial(_launch_and_read, compute, work, how))
            yield {"rows": num_rows, "draws": name, "inputs_and_replay_us": inputs, "step_us": whole}


def _likeliest(num_rows: int) -> Iterator[StepRows]:
    """Of one step after the other."""
    return repeat(StepRows([LIKELIEST] * num_rows, []))


def _columns(params: SamplingParams, num_rows: int) -> Iterator[StepRows]:
    """The same, as the loop has them of requests of which nothing else is told."""
    history = np.arange(_CONTEXT, dtype=np.int32) * 7 % _VOCAB
    rows = [SamplingRow(params, seed, 0, history, _CONTEXT // 2) for seed in range(num_rows)]
    draws = PlainDraws.of(rows)
    if not params.is_penalised:
        return repeat(StepRows(draws, []))
    own = PenalisedRows.of(rows)
    tokens = np.zeros((num_rows, _CONTEXT + _NUM_WARM_STEPS + _NUM_STEPS), np.int32)
    own = replace(own, tokens=tokens, awaited=own.which, serials=own.which + 1)
    return iter([
        StepRows(replace(draws, penalised=replace(own, num_known=own.num_known + step)), [])
        for step in range(_NUM_WARM_STEPS + _NUM_STEPS)
    ])  # fmt: skip


def _launch_and_read(compute: StepCompute, work: Work, how: Iterator[StepRows]) -> None:
    compute.launch(work, next(how)).read()


def _logits(tensors: Mapping[str, torch.Tensor], scratch: Scratch, logits: torch.Tensor) -> torch.Tensor:
    return logits


def _work(num_rows: int) -> Work:
    tables = np.arange(1, 1 + _WIDTH, dtype=np.int32)
    rows = np.arange(num_rows)
    batch = build_batch([ScheduledRow([5], _CONTEXT - 1, tables)] * num_rows, _BLOCK_SIZE)
    batch = replace(batch, rows=rows, awaited_rows=rows)
    return decode_work(batch, np.full(num_rows, _CONTEXT - 1, np.int32), is_awaited=False)


def _median_us(run: Callable[[], object]) -> float:
    with torch.inference_mode():
        for _ in range(_NUM_WARM_STEPS):
            run()
        took = []
        for _ in range(_NUM_STEPS):
            begin = time.perf_counter()
            run()
            took.append(time.perf_counter() - begin)
    return round(float(np.median(took)) * 1e6, 1)
