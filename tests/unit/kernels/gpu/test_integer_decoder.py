"""A decoder whose weights are integers on a device, in Triton's interpreter: the logits of the weights that they stand for."""

import pytest
import torch

from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.model import loader
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.loading.packing import Packing
from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.linear_integers import IntegerWeight, quantise_linear
from kvkeeper.kernels.types import LinearWeight
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model
from tests.support.slices import todays
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch
from tests.unit.kernels.gpu.pretend import on_cuda, pretend_model_on_cuda, pretend_weights_on_cuda

pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp2"), pytest.mark.in_turn]
BLOCK_SIZE, NUM_BLOCKS = 16, 8
BOUND = 2e-5
CASES = [(name, dtype) for name in ("llama", "qwen3", "gpt_oss", "qwen3_moe") for dtype in ("int8", "int4")]


class Restored(Packing):
    """Dense weights on the CPU: those that integers on a device stand for."""

    def _pack(self, weight, numbers):
        bias = None if weight.bias is None else on_cuda(weight.bias)[0]
        found = reference.restore_integers(quantise_linear(LinearWeight(*on_cuda(weight.data), bias), numbers))
        return LinearWeight(found.data.float(), weight.bias)


def run(model, views_there):
    layout = make_kv_layout(model.config, model.dtype, BLOCK_SIZE)
    view = layout.view(torch.zeros(NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8)).fill_(float("nan"))
    runner = ModelRunner(model, on_cuda(view)[0] if views_there else view, layout)
    text, table = random_tokens(24, 1), torch.arange(1, 3).int().numpy()
    found = []
    for first, last in ((0, 20), (20, 21), (21, 24)):  # a prompt, a decode and a chunk
        batch = build_batch([ScheduledRow(text[first:last], first, table, WantLogits.ALL)], BLOCK_SIZE)
        found.append(runner.forward(batch).as_subclass(torch.Tensor))
    return torch.cat(found)


@pytest.mark.parametrize(("name", "dtype"), todays(CASES, 2))
def test_logits_are_those_of_the_restored_weights(name, dtype, tmp_path, monkeypatch):
    folder = build_model_folder(tmp_path, tiny_model(name))
    with monkeypatch.context() as patch:
        patch.setattr(loader, "Packing", Restored)
        dense, _ = load_model(folder, dtype=dtype, progress=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pretend_model_on_cuda(monkeypatch)
    pretend_weights_on_cuda(monkeypatch)
    there, _ = load_model(folder, dtype=dtype, progress=False)
    experts = there._layers[0].mlp
    weights = [there._lm_head, there._layers[0].qkv, there._layers[0].o]
    weights += [experts.gate_up, experts.down] if hasattr(experts, "down") else [experts.stacked.gate_up, experts.stacked.down]
    assert all(isinstance(weight, IntegerWeight) for weight in weights)
    assert float((run(there, True) - run(dense, False)).abs().max()) <= BOUND
