"""A whole decoder on the Triton path, interpreted, against the CPU's: the step's one upload, every kernel, and sampling."""

import dataclasses

import numpy as np
import pytest
import torch

from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.compute.sampler import sample
from kvkeeper.engine_service.compute.stored_model import kv_groups
from kvkeeper.engine_service.model.experts import ExpertWeights
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.values.sampling_params import GREEDY, SamplingParams, SamplingRow
from tests.support.models.tiny_models import TINY_MODELS, build_model_folder, random_tokens
from tests.support.slices import todays
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch
from tests.unit.kernels.gpu.captured import in_groups
from tests.unit.kernels.gpu.pretend import PretendCuda, on_cuda, pretend_model_on_cuda

pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp2"), pytest.mark.in_turn]
BLOCK_SIZE, NUM_BLOCKS = 16, 24
BOUND = 2e-5
CHOSEN = [
    model
    for model in TINY_MODELS
    if model.name
    in (
        "llama_llama3_rope",
        "qwen3",
        "mistral",
        "gemma2",
        "gpt_oss",
        "qwen3_moe",
        "deepseek_v3",
        "gemma4_e2b",
        "gemma4_26b",
    )
]


@pytest.fixture(autouse=True)
def all_claim_to_be_on_cuda(monkeypatch):
    pretend_model_on_cuda(monkeypatch)


def runners(folder, monkeypatch):
    """The same model on the CPU's path and on the kernels', each on an arena that is NaN where nothing was written."""
    model, _ = load_model(folder, progress=False)
    groups = kv_groups(model.config) if model.config.layer_heads else ()
    layout = make_kv_layout(model.config, model.dtype, BLOCK_SIZE, groups)
    monkeypatch.setattr(ExpertWeights, "packed", lambda self, pack: self)  # experts stay in one tensor, as on a device
    on_device, _ = load_model(folder, progress=False)
    num_bytes = max(len(groups), 1) * NUM_BLOCKS * layout.block_bytes
    memory = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2)]
    views = [layout.view(each).fill_(float("nan")) for each in memory]
    return [ModelRunner(model, views[0], layout, groups), ModelRunner(on_device, *on_cuda(views[1]), layout, groups)], groups


@pytest.mark.parametrize("model", todays(CHOSEN, 3), ids=lambda model: model.name)
def test_logits_are_those_of_the_cpu(model, tmp_path, monkeypatch):
    pair, groups = runners(build_model_folder(tmp_path, model), monkeypatch)
    texts = [random_tokens(40, seed) for seed in range(3)]
    tables = [np.arange(1 + 4 * seq, 5 + 4 * seq, dtype=np.int32)[::-1] for seq in range(3)]
    steps = [  # (sequence, first, last): a prompt, its end beside another one, decodes beside a chunk
        [(0, 0, 20)],
        [(0, 20, 33), (1, 0, 17)],
        [(0, 33, 34), (1, 17, 18), (2, 0, 9)],
        [(0, 34, 35), (1, 18, 19), (2, 9, 10)],
    ]
    for step in steps:
        rows = [ScheduledRow(texts[seq][first:last], first, tables[seq], WantLogits.ALL) for seq, first, last in step]
        batch = build_batch(rows, BLOCK_SIZE)
        batch = in_groups(batch, len(groups), NUM_BLOCKS) if groups else batch
        expected, found = (runner.forward(batch) for runner in pair)
        assert isinstance(found, PretendCuda)
        assert float((found.as_subclass(torch.Tensor) - expected).abs().max()) <= BOUND


def test_the_drawn_tokens_are_those_of_the_cpu():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * 3
    logits[4, 7] = float("nan")
    shaped = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, repetition_penalty=1.1)
    chosen = [GREEDY, shaped, SamplingParams(), dataclasses.replace(shaped, min_p=0.1),
              shaped, dataclasses.replace(shaped, frequency_penalty=0.5, presence_penalty=0.2)]  # fmt: skip
    history = np.array([5, 6, 5, 9], np.int32)
    rows = [SamplingRow(params, 11, 0, history, 2) for params in chosen]
    expected, found = sample(logits, rows), sample(on_cuda(logits)[0], rows)
    assert (found.bad_rows, found.stuck_rows) == (expected.bad_rows, expected.stuck_rows) == ((4,), ())
    assert np.delete(found.token_ids, 4).tolist() == np.delete(expected.token_ids, 4).tolist()
