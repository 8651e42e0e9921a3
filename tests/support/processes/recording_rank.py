"""A rank that captures without a device: `python -m tests.support.processes.recording_rank DESCRIPTOR MODEL BLOCKS BLOCK_SIZE`.

It obeys as the rank that the engine starts, on an arena of its own. Its tensors claim to be on CUDA, its kernels are
interpreted, its graphs recorded, and it meets the first rank over gloo. FAILS_AT of its environment, where there is one, is the
number of the capture that fails, SWAPPED one that is made of another size.
"""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvkeeper.engine_service.compute.graphs import graph_api, graphed_steps
from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.split import Split
from kvkeeper.engine_service.ranks.meeting import Meeting
from kvkeeper.engine_service.ranks.messages import Answer, Pipe, PipeEnded
from kvkeeper.engine_service.ranks.rank_process import RankProcess
from tests.support.stand_ins.recorded_graphs import RecordedGraphs, RecordedTogether
from tests.unit.kernels.gpu.pretend import on_cuda, pretend_inputs_on_cuda, pretend_model_on_cuda

FAILS_AT, SWAPS = "FAILS_AT", "SWAPS"
_TIMEOUT_S = 60.0


class FailingGraphs(RecordedGraphs):
    """Graphs of which one cannot be captured, though it was run."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self._left = fails_at

    def capture(self, run: Any) -> Any:
        self._left -= 1
        made = super().capture(run)  # in which ranks meet, as they do not on a device
        if self._left == 0:
            raise RuntimeError("a test")
        return made


def make_runner(folder: Path, num_blocks: int, block_size: int, split: Split) -> ModelRunner:
    """The model of a rank on an arena of its own, which claims to be on CUDA as its inputs do."""
    model, _ = load_model(folder, progress=False, split=split)
    layout = make_kv_layout(model.config, model.dtype, block_size)
    view = layout.view(torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8))
    return ModelRunner(model, on_cuda(view)[0], layout)


def main() -> None:
    descriptor, folder, num_blocks, block_size = sys.argv[1:]
    torch.set_num_threads(1)
    patches = pytest.MonkeyPatch()
    pretend_model_on_cuda(patches)
    pretend_inputs_on_cuda(patches)
    fails_at, graphs = os.environ.get(FAILS_AT), RecordedGraphs()
    if fails_at is not None:
        graphs = FailingGraphs(int(fails_at))
    patches.setattr(graph_api, "CudaGraphs", lambda device: graphs)
    if SWAPS in os.environ:
        sizes = graphed_steps.StepSizes.__iter__
        patches.setattr(graphed_steps.StepSizes, "__iter__", lambda every: iter([*sizes(every)][::-1]))
    rank, meeting = RankProcess.__new__(RankProcess), Meeting(2)
    rank._pipe, rank._rank, rank._num_ranks, rank._timeout_s = Pipe(socket.socket(fileno=int(descriptor))), 1, 2, _TIMEOUT_S
    rank._device, rank._meeting, rank._failed = torch.device("cpu"), meeting, []
    runner = make_runner(Path(folder), int(num_blocks), int(block_size), Split(1, 2, RecordedTogether(meeting, graphs)))
    patches.setattr("kvkeeper.engine_service.compute.model_runner.warm_up_batches", lambda *args, **options: ())
    mapped: Any = SimpleNamespace(runner=runner, mover=SimpleNamespace(make_ready=lambda: None))
    rank._mapped = mapped
    rank._pipe.send(Answer.DONE)
    try:
        while True:
            rank.obey(*rank._pipe.receive())
    except PipeEnded:
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
