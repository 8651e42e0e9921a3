"""Tokens that a captured graph draws, on the Triton path, interpreted: those that are drawn without one."""

import dataclasses

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.sampler import StepLogits, draw
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.values.sampling_params import LIKELIEST, PenalisedRows, PlainDraws, SamplingParams, SamplingRow
from tests.support.models.tiny_models import build_model_folder
from tests.support.slices import todays
from tests.unit.kernels.gpu.captured import (
    CONTEXTS,
    GEMMA2,
    MOST_ROWS,
    QWEN3,
    TABLES,
    TEXTS,
    all_claim_to_be_on_cuda,
    drawn_by,
    mixed,
    model,
    prompts,
    ready,
    rows,
)
from tests.unit.kernels.gpu.pretend import on_cuda

__all__ = ["all_claim_to_be_on_cuda", "model"]  # fixtures of the tests here
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp2"), pytest.mark.in_turn]


@pytest.fixture(params=todays([QWEN3, GEMMA2], 1), ids=lambda model: model.name)
def each_model(request, tmp_path):
    return load_model(build_model_folder(tmp_path, request.param), progress=False)[0]


def test_what_a_graph_draws_is_what_is_drawn_without_one(each_model):
    runner, _ = ready(each_model, draws=True)
    prompts(runner)
    found = set()
    for draws, seqs in enumerate(([0], [8, 1], [3, 6, 5], list(range(MOST_ROWS))), 1):
        how, places = drawn_by(seqs), np.arange(len(seqs))[::-1].copy()
        batch = dataclasses.replace(rows(seqs), rows=places)
        with torch.inference_mode():
            step = runner.stage(batch, how if draws % 2 else PlainDraws.of(how))()
        assert runner.graphed.num_draws == draws
        drawn, outside = draw(step, how), draw(StepLogits(on_cuda(step.values.clone())[0]), how)
        assert drawn.drawn is step.drawn
        assert drawn.drawn.tolist() == outside.drawn.tolist() == drawn.outcomes.tolist() == outside.outcomes.tolist()
        assert runner.last_tokens.tensor[places].tolist() == drawn.drawn.tolist(), "for the step behind"
        found.update(drawn.drawn.tolist())
    assert len(found) > 5, "they are drawn"


def test_rows_behind_prompts_are_drawn_by_the_graph_of_as_many_rows(model):
    runner, _ = ready(model, draws=True)
    prompts(runner)
    penalty = SamplingParams(temperature=0.5, repetition_penalty=1.8)
    for draws, (decoding, prompted) in enumerate((([], [0]), ([3, 8], [6, 2]), ([1], [4, 7])), 1):
        seqs = np.array([*decoding, *prompted])
        how, batch = drawn_by(seqs.tolist()), dataclasses.replace(mixed(decoding, prompted, 5), rows=np.arange(len(seqs)))
        own = PenalisedRows.of(penalised := drawn_by(seqs.tolist(), [penalty]))
        own = dataclasses.replace(own, tokens=np.array(TEXTS, np.int32), which=seqs, serials=seqs + 1)
        with torch.inference_mode():
            step = runner.stage(batch, how)()
            assert step.drawn.tolist() == draw(StepLogits(on_cuda(step.values.clone())[0]), how).drawn.tolist()
            assert runner.last_tokens.tensor[: len(seqs)].tolist() == step.drawn.tolist()
            step = runner.stage(batch, dataclasses.replace(PlainDraws.of(penalised), penalised=own), runner.counts.stage(own))()
            expected = draw(StepLogits(step.values.as_subclass(torch.Tensor).clone()), penalised)
            assert step.drawn.tolist() == expected.drawn.tolist()
        counts = runner.graphed.num_with_prompts, runner.graphed.num_draws, runner.graphed.num_penalised
        assert counts == (2 * draws, 2 * draws, draws)


def test_rows_that_no_graph_can_draw_are_drawn_behind_it(model):
    class OneToken:
        def allowed(self):
            return np.arange(model.config.vocab_size) == 7

    runner, _ = ready(model, draws=True)
    prompts(runner)
    penalised, by_column = [SamplingParams(temperature=0.5, repetition_penalty=1.2)], PlainDraws.of(drawn_by([0, 1]))
    for how in (
        drawn_by([0, 1], penalised),
        dataclasses.replace(by_column, penalised=PenalisedRows.of(drawn_by([0, 1], penalised))),
        [*drawn_by([0]), *drawn_by([1], constraint=OneToken())],
        [LIKELIEST, LIKELIEST],
        drawn_by([0]),  # of one row alone
    ):
        with torch.inference_mode():
            step = runner.stage(rows([0, 1]), how)()
        assert step.drawn is None
        assert step.likeliest.tolist() == step.outcomes.tolist()
    assert runner.graphed.num_draws == 0


def test_a_row_that_is_not_finite_is_told_and_the_others_are_drawn(model):
    runner, view = ready(model, draws=True)
    prompts(runner)
    view[TABLES[1][0]] = float("nan")
    how = drawn_by([0, 1, 2])
    with torch.inference_mode():
        step = runner.stage(rows([0, 1, 2]), how)()
    assert (step.outcomes >= 0).tolist() == [True, False, True]
    assert step.outcomes.tolist() == draw(StepLogits(on_cuda(step.values.clone())[0]), how).outcomes.tolist()


def test_what_a_graph_draws_with_penalties_is_what_is_drawn_without_one(each_model):
    """Step for step: sequences go on, come and are away for a step, and one of them is not penalised."""
    runner, _ = ready(each_model, draws=True)
    prompts(runner)
    ways = [
        SamplingParams(temperature=0.5, repetition_penalty=1.8),
        SamplingParams(temperature=0, frequency_penalty=0.7, presence_penalty=0.4),
        SamplingParams(temperature=1.1, top_k=9),
    ]
    lens = {seq: CONTEXTS[seq] + 1 for seq in range(len(CONTEXTS))}
    table = np.array(TEXTS, np.int32)
    for at, seqs in enumerate(([0], [0, 3, 4], [3, 2, 0, 1], [0, 3, 2]), 1):
        at_rows = np.array(seqs)
        how, outside = [], []
        for seq in seqs:
            known, way = table[seq, : lens[seq]], ways[seq % 3]
            outside.append(SamplingRow(way, seq, 0, known, 1))
            is_awaited = at > 1 and seq == 0
            how.append(SamplingRow(way, seq, 0, known[:-1], 1, awaited_row=seq) if is_awaited else outside[-1])
        penalised = [row for row, seq in enumerate(seqs) if ways[seq % 3].is_penalised]
        chosen = at_rows[penalised]
        own = PenalisedRows.of(how)
        own = dataclasses.replace(own, tokens=table, which=chosen, serials=chosen + 1)
        batch = rows(seqs, first=lambda seq: lens[seq] - 1, last=lambda seq: lens[seq])
        awaited = np.array([-1 if row.awaited_row is None else row.awaited_row for row in how])
        batch = dataclasses.replace(batch, rows=at_rows, awaited_rows=awaited)
        with torch.inference_mode():
            counted = runner.counts.stage(own)
            step = runner.stage(batch, dataclasses.replace(PlainDraws.of(how), penalised=own), counted)()
            expected = draw(StepLogits(step.values.as_subclass(torch.Tensor).clone()), outside)
        assert runner.graphed.num_penalised == at
        assert step.drawn.tolist() == step.outcomes.tolist() == expected.drawn.tolist()
        assert runner.last_tokens.tensor[at_rows].tolist() == expected.drawn.tolist()
        for seq, token in zip(seqs, expected.drawn.tolist(), strict=True):
            table[seq, lens[seq]] = token
            lens[seq] += 1
