"""What tests of captured steps share: a tiny model on an arena, its contexts, and a runner that has captured.

Contexts are drawn, not computed: what a decode reads is the same for a graph and without one, and prompts take the interpreter
long.
"""

import dataclasses

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.graphs import graphed_steps
from kvkeeper.engine_service.compute.model_runner import ModelRunner, StepBounds, make_kv_layout
from kvkeeper.engine_service.model.experts import ExpertWeights
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.values.sampling_params import GREEDY, NEUTRAL, SamplingParams, SamplingRow
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model
from tests.support.stand_ins.recorded_graphs import RecordedGraphs
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch
from tests.unit.kernels.gpu.pretend import on_cuda, pretend_inputs_on_cuda, pretend_model_on_cuda

BLOCK_SIZE, WIDTH, MOST_ROWS = 16, 3, 5
BOUNDS = StepBounds(MOST_ROWS, WIDTH * BLOCK_SIZE, most_step_tokens=16)
CONTEXTS = [5, 16, 31, 1, 33, 40, 15, 47, 20]
NUM_BLOCKS = 1 + len(CONTEXTS) * WIDTH
QWEN3, GEMMA2, LLAMA4 = (tiny_model(name) for name in ("qwen3", "gemma2", "llama4"))
CHOSEN = [QWEN3, GEMMA2, LLAMA4]  # LLAMA4: chunks, the lengths that queries grow with, and experts


@pytest.fixture(autouse=True)
def all_claim_to_be_on_cuda(monkeypatch):
    pretend_model_on_cuda(monkeypatch)
    pretend_inputs_on_cuda(monkeypatch)
    monkeypatch.setattr(ExpertWeights, "packed", lambda self, pack: self)  # experts stay in one tensor, as on a device


@pytest.fixture
def model(tmp_path):
    return load_model(build_model_folder(tmp_path, QWEN3), progress=False)[0]


def make_runner(model):
    """A runner on an arena of its own, all of it NaN but the null block."""
    layout = make_kv_layout(model.config, model.dtype, BLOCK_SIZE)
    view = layout.view(torch.zeros(NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8)).fill_(float("nan"))
    view[0] = 0
    return ModelRunner(model, on_cuda(view)[0], layout), view


def ready_cold(runner, graphs=None, *, draws=False, bounds=BOUNDS):
    """Captures without the steps before it, which have a test of their own. draws: with the graphs that draw.

    Of a model with experts, which the interpreter takes long for, the two smallest sizes.
    """
    if runner._model.config.experts:
        bounds = StepBounds(2, bounds.most_tokens, most_step_tokens=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvkeeper.engine_service.compute.model_runner.warm_up_batches", lambda *args, **options: ())
        if not draws:
            patch.setattr(graphed_steps, "_draw", lambda made, *drawing: made)
        runner.make_ready(bounds, graphs or RecordedGraphs(), with_retention=False, progress=False)


def ready(model, graphs=None, *, draws=False):
    runner, view = make_runner(model)
    ready_cold(runner, graphs, draws=draws)
    assert runner.graphed is not None
    return runner, view


TABLES = [np.arange(1 + WIDTH * seq, 1 + WIDTH * (seq + 1), dtype=np.int32)[::-1] for seq in range(len(CONTEXTS))]
TEXTS = [random_tokens(WIDTH * BLOCK_SIZE, seed) for seed in range(len(CONTEXTS))]


def rows(seqs, first=lambda seq: CONTEXTS[seq], last=lambda seq: CONTEXTS[seq] + 1, want=WantLogits.LAST):
    chosen = [ScheduledRow(TEXTS[seq][first(seq) : last(seq)], first(seq), TABLES[seq], want) for seq in seqs]
    return build_batch(chosen, BLOCK_SIZE)


def prompts(runner):
    """Keys and values of all contexts, the same in every arena; drawn, because to compute them takes the interpreter long."""
    view, drawn = runner._kv_view.as_subclass(torch.Tensor), torch.Generator().manual_seed(1)
    for seq, context in enumerate(CONTEXTS):
        for position in range(context):
            slot = view[TABLES[seq][position // BLOCK_SIZE], :, :, position % BLOCK_SIZE]
            slot.copy_(torch.randn(slot.shape, generator=drawn))


def in_groups(batch, num_groups, num_blocks=NUM_BLOCKS):
    """The same with blocks of its own for each further group, those behind all of the groups before."""
    shifts = np.arange(1, num_groups) * num_blocks
    tables = batch.block_tables[:, None]
    shifted = np.where(tables > 0, tables + shifts[:, None], 0).astype(np.int32)
    return dataclasses.replace(batch, group_tables=shifted, group_slots=batch.slot_mapping + shifts[:, None] * BLOCK_SIZE)


def plain(tensor):
    return tensor.as_subclass(torch.Tensor).clone()


def mixed(decoding, prompts, num_new=7, want=WantLogits.LAST):
    """Rows of one token, and prompts that begin so many tokens before the end of their contexts."""
    parts = [(decoding, lambda seq: CONTEXTS[seq]), (prompts, lambda seq: max(CONTEXTS[seq] + 1 - num_new, 0))]
    chosen = [
        ScheduledRow(TEXTS[seq][first(seq) : CONTEXTS[seq] + 1], first(seq), TABLES[seq], want)
        for seqs, first in parts
        for seq in seqs
    ]
    return build_batch(chosen, BLOCK_SIZE)


WAYS = [
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20),
    GREEDY,
    SamplingParams(temperature=1.5, min_p=0.05),
    SamplingParams(temperature=1.0, typical_p=0.7),
    NEUTRAL,
    SamplingParams(temperature=2.0, top_k=3),
]


def drawn_by(seqs, ways=WAYS, **told):
    return [SamplingRow(ways[seq % len(ways)], 2**63 + seq, seq % 2, TEXTS[seq][: CONTEXTS[seq]], 1, **told) for seq in seqs]
