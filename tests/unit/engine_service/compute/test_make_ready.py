"""What a model on a device does before its first step: who captures graphs, and the bars that show how far it is."""

import dataclasses
import sys

import pytest
import torch

from kvkeeper.engine_service.compute import served_model
from kvkeeper.engine_service.compute.model_runner import ModelRunner, StepBounds, make_kv_layout
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.split import WHOLE, Split
from tests.support.models.tiny_models import build_model_folder, tiny_model

BLOCK_SIZE, NUM_BLOCKS = 4, 9
BOUNDS = StepBounds(2, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    llama = tiny_model("llama")
    return build_model_folder(tmp_path_factory.mktemp("model"), llama)


class Graphs:
    """A GraphApi whose graphs are the functions themselves."""

    def __init__(self, device=None):
        self.device = device

    def capture(self, run):
        class Graph:
            replay = staticmethod(run)

        return Graph(), run()


class Told:
    """A Runner that is made ready, and notes how."""

    def make_ready(self, bounds, graphs, *, with_retention, progress, flashinfer):
        self.graphs, self.with_retention, self.progress = graphs, with_retention, progress


@pytest.fixture
def made_ready(folder, monkeypatch):
    """What a runner is told by a model that was loaded on a CPU and is said to be on a device."""
    monkeypatch.setattr(served_model, "CudaGraphs", Graphs)
    load = served_model._from_folder

    def on_device(*args):
        return dataclasses.replace(load(*args), device=torch.device("cuda", 1))

    monkeypatch.setattr(served_model, "_from_folder", on_device)

    def made(split=WHOLE, *, is_whole=False, **flags):
        served = load_served_model(EngineConfig(model=str(folder), **flags), split)
        served, runner = served.whole if is_whole else served, Told()
        served.make_ready(runner, BOUNDS)
        return runner

    return made


def test_decodes_are_captured_on_the_devices_of_the_model(made_ready):
    assert made_ready().graphs.device == torch.device("cuda", 1)


def test_nothing_is_captured_without_graphs(made_ready):
    assert made_ready(graphs=False).graphs is None


def test_the_first_of_several_ranks_captures_as_one_does(made_ready):
    """The others do when it asks them to: see RankedRunner."""
    assert made_ready(Split(0, 2)).graphs.device == torch.device("cuda", 1)
    assert made_ready(Split(0, 2), graphs=False).graphs is None


@pytest.mark.parametrize("is_whole", [False, True], ids=["with a tail", "without one"])
def test_steps_with_sink_and_window_are_tried_where_they_may_come(is_whole, made_ready):
    assert made_ready().with_retention
    assert not made_ready(kv_dtype="int8", is_whole=is_whole).with_retention


def test_bars_are_shown_on_a_terminal_that_wants_them(made_ready, monkeypatch):
    assert not made_ready().progress, "a file"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert made_ready().progress
    assert not made_ready(progress=False).progress


@pytest.mark.parametrize("progress", [True, False])
def test_bars_count_the_steps_and_the_sizes(progress, folder, capfd):
    model, _ = load_model(folder, progress=False)
    layout = make_kv_layout(model.config, model.dtype, BLOCK_SIZE)
    view = layout.view(torch.zeros(NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8))
    runner = ModelRunner(model, view, layout)
    runner.make_ready(BOUNDS, Graphs(), with_retention=False, progress=progress)
    assert runner.graphed is not None
    shown = capfd.readouterr().err
    if not progress:
        assert shown == ""
        return
    assert "warming up: 100%" in shown
    assert "capturing: 100%" in shown
    assert "22/22" in shown.partition("capturing: 100%")[2], "decodes of 1 and 2, and ten sizes of prompts beside none or 2"
