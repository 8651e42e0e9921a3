"""Captures that all ranks make at once: what one of them cannot capture, none has, and a step that fails is no such failure."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvkeeper.engine_service.compute.graphs.graph_api import AgreedGraphs, NotCaptured
from kvkeeper.engine_service.compute.model_runner import ModelRunner, StepBounds, make_kv_layout
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.split import Split
from tests.support.models.tiny_models import build_model_folder, tiny_model
from tests.support.worlds.rank_threads import on_ranks

CPU, BLOCK_SIZE, NUM_BLOCKS = torch.device("cpu"), 4, 9


class Graphs:
    """A GraphApi that captures nothing of what it runs, and fails as it is told."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def capture(self, run: Callable[[], Any]) -> Any:
        made = run()
        if self.fails:
            raise RuntimeError("a test")
        return self, made

    def replay(self) -> None: ...


class OneThatCopies:
    """The other rank has what this one has. num_met: how often they came together."""

    num_met = 0

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        self.num_met += 1
        return part * 2

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack((part, part))

    def share(self, given: torch.Tensor) -> torch.Tensor:
        return given


@pytest.mark.parametrize(("failing", "words"), [(None, []), (1, ["another rank", "this rank: a test"])])
def test_what_one_rank_cannot_capture_none_has(failing: int | None, words: list[str]) -> None:
    def capture(split: Split) -> str:
        graphs = Graphs(fails=split.rank == failing)
        try:
            graph, made = AgreedGraphs(graphs, split, CPU).capture(lambda: split.rank)
        except NotCaptured as error:
            return str(error).removeprefix("a step could not be captured on ")
        assert (graph, made) == (graphs, split.rank)
        return "captured"

    assert on_ranks(2, capture) == (words or ["captured"] * 2)


def test_a_step_that_fails_before_it_is_captured_is_not_agreed_on() -> None:
    """The other ranks are in the middle of it."""
    together = OneThatCopies()

    def run() -> None:
        raise MemoryError("a test")

    with pytest.raises(MemoryError, match="a test"):
        AgreedGraphs(Graphs(), Split(0, 2, together), CPU).capture(run)
    assert together.num_met == 0


@pytest.mark.parametrize(("num_runs", "expected"), [(0, RuntimeError), (1, None)], ids=["the step fails", "its capture fails"])
def test_a_rank_computes_without_graphs_only_where_all_ranks_know(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, num_runs: int, expected: type[Exception] | None
) -> None:
    model, _ = load_model(build_model_folder(tmp_path, tiny_model("llama")), progress=False, split=Split(1, 2, OneThatCopies()))
    layout = make_kv_layout(model.config, model.dtype, BLOCK_SIZE)
    runner = ModelRunner(model, layout.view(torch.zeros(NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8)), layout)
    bounds, left = StepBounds(2, 8), num_runs
    shape = runner.find_shape(bounds)
    assert shape is not None

    def run(*parts: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("a test")

    monkeypatch.setattr(runner, "_plain_step", run)
    graphs: Any = Graphs(fails=True)
    if expected is None:
        runner.capture(shape, bounds, graphs, progress=False)
    else:
        with pytest.raises(expected, match="a test"):
            runner.capture(shape, bounds, graphs, progress=False)
    assert runner.graphed is None
