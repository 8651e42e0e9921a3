"""Captured decodes of a model with recurrent layers, interpreted: the logits and the states of plain steps."""

import dataclasses

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.model_runner import ModelRunner
from kvkeeper.engine_service.model.loader import load_model
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model
from tests.support.slices import todays
from tests.support.worlds.batches import ScheduledRow
from tests.support.worlds.hand_tables import HandTables
from tests.unit.kernels.gpu.captured import BOUNDS, all_claim_to_be_on_cuda, plain, ready_cold
from tests.unit.kernels.gpu.pretend import on_cuda

__all__ = ["all_claim_to_be_on_cuda"]  # a fixture of the tests here
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
SIZE, WIDTH = 4, 6
TEXTS = [random_tokens(SIZE * WIDTH, seed) for seed in range(3)]


@pytest.fixture(params=todays(["kimi_linear", "nemotron_h_biased", "qwen3_next"], 1))
def model(request, tmp_path):
    """Without experts, which the interpreter takes long for."""
    kind = tiny_model(request.param)
    changes = {"mlp_layer_types": ["dense"] * 7} if request.param == "kimi_linear" else {"mlp_only_layers": [0, 1, 2, 3]}
    dense = dataclasses.replace(kind, overrides={**kind.overrides, **changes})
    model = load_model(build_model_folder(tmp_path, dense), progress=False)[0]
    model.config = dataclasses.replace(model.config, experts=None)
    return model


def make_world(model):
    """A runner with tables, of which each row has a page of each block."""
    tables = HandTables(model, SIZE, num_blocks=150)
    tables.view[0] = 0
    runner = tables.runner = ModelRunner(model, on_cuda(tables.view)[0], tables.runner.layout, tables.runner._groups)
    own = [np.array([tables.take(WIDTH) for _ in range(1 + tables.num_state_groups)], np.int32) for _ in TEXTS]
    return tables, runner, own


def step(tables, own, rows, position):
    return tables.batch_of(
        [ScheduledRow([TEXTS[row][position]], position, own[row][0]) for row in rows], [own[row] for row in rows]
    )


def test_captured_decodes_have_the_logits_and_the_states_of_plain_ones(model):
    worlds = [make_world(model) for _ in range(2)]
    captured = worlds[0][1]
    ready_cold(captured, bounds=dataclasses.replace(BOUNDS, most_tokens=SIZE * WIDTH))
    assert captured.graphed is not None
    atol = 5e-6 if model.config.is_latent else 1e-6  # what is added up together depends on the rows, and padding is rows
    for position in range(SIZE + 2):  # over the edge of a block: one page is read, and another one written
        rows = [0, 1, 2] if position % 2 else [2, 0, 1]
        found, expected = (runner.forward(step(tables, own, rows, position)) for tables, runner, own in worlds)
        torch.testing.assert_close(plain(found), plain(expected), rtol=0, atol=atol)
    assert captured.graphed.num_replays == SIZE + 2
    views = [tables.view.float() for tables, _, _ in worlds]
    torch.testing.assert_close(*views, rtol=0, atol=atol, equal_nan=True)
    assert not views[0][0].any(), "padding wrote to the null block"


def test_a_step_with_a_prompt_is_computed_plainly(model):
    tables, runner, own = make_world(model)
    ready_cold(runner, bounds=dataclasses.replace(BOUNDS, most_tokens=SIZE * WIDTH))
    batch = tables.batch_of([ScheduledRow(TEXTS[0][:6], 0, own[0][0])], own[:1])
    assert plain(runner.forward(batch)).isfinite().all()
    assert runner.graphed.num_replays == 0
