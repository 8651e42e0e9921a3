"""Penalties on the host and on a device: one definition, to the same bits, and rows without a penalty untouched."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.device.token_counts import LastTokens
from kvkeeper.engine_service.compute.penalties import apply_penalties
from kvkeeper.engine_service.values.sampling_params import SamplingParams, SamplingRow
from tests.unit.kernels.gpu.pretend import on_cuda

pytestmark = pytest.mark.usefixtures("kernel_path")

VOCAB = 40
PENALTIES = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6, "frequency_penalty": -0.3},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.1},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.4},
]


def rows_of(chosen, seed=0, longest=90):
    """Histories that repeat themselves, some of them empty, some of them prompt alone."""
    rng, rows = np.random.default_rng(seed), []
    for penalties in chosen:
        tokens = rng.integers(0, VOCAB, rng.integers(0, longest)).astype(np.int32)
        num_prompt = int(rng.integers(0, len(tokens) + 1))
        rows.append(SamplingRow(SamplingParams(**penalties), 0, 0, tokens, num_prompt))
    return rows


def logits_of(num_rows, seed=0):
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    logits[::2, ::7] = -torch.inf
    return logits


def defined(logits, row):
    """The definition of SamplingParams, token by token, in the widths that the results are told in."""
    found, params = logits.numpy().copy(), row.params
    penalty = np.float32(params.repetition_penalty)
    for token in set(row.token_ids.tolist()):
        found[token] = found[token] / penalty if found[token] > 0 else found[token] * penalty
    output = row.token_ids[row.num_prompt_tokens :].tolist()
    for token in set(output):
        less = float(np.float32(params.frequency_penalty)) * output.count(token) + float(np.float32(params.presence_penalty))
        found[token] -= np.float32(less)
    return torch.from_numpy(found)


@pytest.mark.parametrize("seed", range(6))
def test_the_host_and_a_device_penalise_as_defined(seed):
    chosen = [PENALTIES[index] for index in np.random.default_rng(seed).integers(0, len(PENALTIES), 12)]
    rows, logits = rows_of(chosen, seed), logits_of(12, seed)
    before = logits.clone()
    host, device = apply_penalties(logits, rows), apply_penalties(on_cuda(logits)[0], rows).as_subclass(torch.Tensor)
    expected = torch.stack([defined(own, row) for own, row in zip(logits, rows, strict=True)])
    assert torch.equal(host, expected)
    assert torch.equal(device, expected)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("seed", range(3))
def test_a_token_that_the_host_does_not_know_yet_counts_as_one_that_it_knows(seed):
    chosen = [PENALTIES[index] for index in np.random.default_rng(seed).integers(1, len(PENALTIES), 12)]
    whole, logits, last = rows_of(chosen, seed), logits_of(12, seed), LastTokens()
    rows = []
    for at, row in enumerate(whole):
        is_awaited = at % 3 > 0 and len(row.token_ids) > row.num_prompt_tokens
        if is_awaited:
            last.put(np.array([30 - at]), torch.from_numpy(row.token_ids[-1:].astype(np.int64)))
            row = replace(row, token_ids=row.token_ids[:-1], awaited_row=30 - at)
        rows.append(row)
    assert sum(row.awaited_row is not None for row in rows) > 3
    assert [row.position for row in rows] == [row.position for row in whole]
    expected = apply_penalties(logits, whole)
    assert torch.equal(apply_penalties(logits, rows, last), expected)
    assert torch.equal(apply_penalties(on_cuda(logits)[0], rows, last).as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("penalties", PENALTIES[1:], ids=str)
def test_a_history_without_tokens_changes_nothing(penalties):
    rows, logits = [SamplingRow(SamplingParams(**penalties), 0, 0, np.empty(0, np.int32), 0)], logits_of(1)
    assert torch.equal(apply_penalties(logits, rows), logits)
    assert torch.equal(apply_penalties(on_cuda(logits)[0], rows).as_subclass(torch.Tensor), logits)


def test_without_penalties_the_logits_are_those_that_came():
    logits = logits_of(3)
    assert apply_penalties(logits, rows_of([{}] * 3)) is logits


@pytest.mark.parametrize("claim", [False, True])
def test_rows_that_are_not_finite_leave_the_others_alone(claim):
    logits = logits_of(3)
    logits[1] = torch.tensor([float("nan"), torch.inf] * (VOCAB // 2))
    rows = rows_of([PENALTIES[5]] * 3, seed=2)
    found = apply_penalties(on_cuda(logits)[0] if claim else logits, rows).as_subclass(torch.Tensor)
    for index in (0, 2):
        assert torch.equal(found[index], defined(logits[index], rows[index]))
