"""What the first rank has the others make ready for is what it makes ready for itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvkeeper.engine_service.compute.device.device_queue import HostQueue
from kvkeeper.engine_service.compute.graphs import graph_api
from kvkeeper.engine_service.compute.graphs.graphed_steps import StepShape
from kvkeeper.engine_service.compute.model_runner import ModelRunner, StepBounds
from kvkeeper.engine_service.ranks.messages import Answer
from kvkeeper.engine_service.ranks.rank_process import RankProcess
from kvkeeper.engine_service.ranks.ranked_runner import RankedRunner
from kvkeeper.kernels.attention import flashinfer_prefill
from kvkeeper.kernels.attention.flashinfer_prefill import FlashInfer

SHAPE = StepShape(3, 7, 4, 512, 90, 16, 2, (2, 3))


class Noted(ModelRunner):
    """Notes what it is told to make ready for, and to capture."""

    def __init__(self) -> None:
        self.queue = HostQueue()
        self.told: list[Any] = []

    def make_ready(self, bounds: StepBounds, graphs: object, **options: Any) -> None:
        self.told.append((bounds, graphs, options["with_retention"], options["flashinfer"]))

    def find_shape(self, bounds: StepBounds) -> StepShape:
        return SHAPE

    def capture(self, shape: StepShape, bounds: StepBounds, graphs: object, *, progress: bool) -> None:
        self.told.append((shape, bounds, graphs))


def test_all_ranks_make_ready_for_the_same_steps_and_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    own, of_other = FlashInfer(object(), "1"), FlashInfer(object(), "1")
    monkeypatch.setattr(flashinfer_prefill, "find_flashinfer", lambda *, wanted: of_other)
    first, other, calls = Noted(), Noted(), list[Any]()
    rank = RankProcess.__new__(RankProcess)
    rank._pipe = SimpleNamespace(send=calls.append)  # type: ignore[assignment]
    mapped: Any = SimpleNamespace(runner=other, mover=SimpleNamespace(make_ready=lambda: calls.append("mover")))
    ranks: Any = SimpleNamespace(
        send_all=lambda kind, body: rank._step(kind, bytearray(body), mapped), hear=lambda: calls.append("heard")
    )
    bounds = StepBounds(3, 500, 700, may_retain=False)
    RankedRunner(first, ranks).make_ready(bounds, None, with_retention=True, progress=False, flashinfer=own)
    assert (first.told, other.told) == ([(bounds, None, True, own)], [(bounds, None, True, of_other)])
    assert calls == ["mover", Answer.DONE, "heard"]
    RankedRunner(first, ranks).make_ready(
        bounds, None, with_retention=True, progress=False, flashinfer=FlashInfer(None, "", "off")
    )
    assert other.told[-1] == (bounds, None, True, None)
    assert len(other.told) == 2, "nothing is captured"
    device, graphs = torch.device("cuda", 2), "of the first rank"
    rank._device = device
    monkeypatch.setattr(graph_api, "CudaGraphs", lambda device: ("of", device))
    RankedRunner(first, ranks).make_ready(bounds, graphs, with_retention=True, progress=False)  # type: ignore[arg-type]
    assert first.told[-2:] == [(bounds, None, True, None), (SHAPE, bounds, graphs)], "behind all that is run before"
    assert other.told[-2:] == [(bounds, None, True, None), (SHAPE, bounds, ("of", device))]
    assert calls[-4:] == [Answer.DONE, "heard", Answer.DONE, "heard"]
