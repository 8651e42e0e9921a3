"""Rows that are drawn behind a captured decode, on the Triton path, interpreted: what they depend on is as before."""

import dataclasses

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.sampler import StepLogits, draw
from kvkeeper.engine_service.compute.step_compute import StepCompute, StepRows
from kvkeeper.engine_service.values.sampling_params import PenalisedRows, PlainDraws, SamplingParams, SamplingRow
from kvkeeper.engine_service.values.token_rules import TokenRules
from tests.support.worlds.batches import decode_work
from tests.unit.kernels.gpu.captured import CONTEXTS, TEXTS, all_claim_to_be_on_cuda, model, plain, prompts, ready, rows

__all__ = ["all_claim_to_be_on_cuda", "model"]  # fixtures of the tests here
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp2"), pytest.mark.in_turn]


@pytest.mark.parametrize("told_by", ["row", "column"])
def test_histories_end_with_the_token_of_the_step_before(model, told_by):
    """A graph leaves its likeliest tokens in its place."""
    runner, _ = ready(model, draws=True)
    prompts(runner)
    seqs, way = np.array([0, 3]), SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=10.0)
    known = [np.array(TEXTS[seq][: CONTEXTS[seq] + 1], np.int32) for seq in seqs]
    with torch.inference_mode():
        runner.last_tokens.put(seqs, torch.tensor([int(text[-1]) for text in known]))
    batch = dataclasses.replace(rows(seqs), rows=seqs, awaited_rows=seqs, token_ids=np.zeros(len(seqs), np.int64))
    how = [SamplingRow(way, 0, 0, text[:-1], 1, awaited_row=seq) for seq, text in zip(seqs, known, strict=True)]
    if told_by == "column":  # whose rows they are is not told, so the device has no counts of them
        how = dataclasses.replace(PlainDraws.of(how), penalised=PenalisedRows.of(how))
    work = decode_work(batch, np.array([CONTEXTS[seq] for seq in seqs], np.int32), is_awaited=True)
    work = dataclasses.replace(work, sampled=[None] * len(seqs))
    drawn = StepCompute(runner).launch(work, StepRows(how, [])).read().sampled.token_ids.tolist()
    assert runner.graphed.num_replays == 1 and not runner.graphed.num_draws

    logits = plain(runner.forward(rows(seqs)))
    outside = draw(StepLogits(logits), [SamplingRow(way, 0, 0, text, 1) for text in known])
    assert drawn == outside.drawn.tolist()
    assert drawn == logits.argmax(dim=1).tolist(), "the likeliest of all has no part in the histories"
    assert runner.last_tokens.tensor[seqs].tolist() == drawn, "for the step behind"


def test_rules_hold_behind_a_graph(model):
    """Also where they follow from the token of the step before, which the host does not know, and the graph leaves another."""
    runner, _ = ready(model, draws=True)
    prompts(runner)
    seqs, way = np.array([0, 3]), SamplingParams(temperature=0)
    known = [np.array(TEXTS[seq][: CONTEXTS[seq] + 1], np.int32) for seq in seqs]
    logits = plain(runner.forward(rows(seqs)))
    likeliest, num_replays = logits.argmax(dim=1).tolist(), runner.graphed.num_replays
    words = [(int(text[-1]), token) for text, token in zip(known, likeliest, strict=True)]
    rules = TokenRules({}, None, words, 0, frozenset())
    expected = draw(StepLogits(logits), [SamplingRow(way, 0, 0, text, 1, rules=rules) for text in known]).drawn.tolist()
    assert all(token != best for token, best in zip(expected, likeliest, strict=True))
    with torch.inference_mode():
        runner.last_tokens.put(seqs, torch.tensor([int(text[-1]) for text in known]))
    batch = dataclasses.replace(rows(seqs), rows=seqs, awaited_rows=seqs, token_ids=np.zeros(len(seqs), np.int64))
    how = [SamplingRow(way, 0, 0, text[:-1], 1, awaited_row=seq, rules=rules) for seq, text in zip(seqs, known, strict=True)]
    work = decode_work(batch, np.array([CONTEXTS[seq] for seq in seqs], np.int32), is_awaited=True)
    work = dataclasses.replace(work, sampled=[None] * len(seqs))
    drawn = StepCompute(runner).launch(work, StepRows(how, [])).read().sampled.token_ids.tolist()
    assert runner.graphed.num_replays == num_replays + 1 and not runner.graphed.num_draws
    assert drawn == expected
    assert runner.last_tokens.tensor[seqs].tolist() == drawn, "for the step behind"
