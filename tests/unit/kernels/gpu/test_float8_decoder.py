"""A decoder of 8-bit floats on a device, in Triton's interpreter: near one that rounds alike in float64, and float32."""

import pytest
import torch

from kvkeeper.engine_service.compute.model_runner import ModelRunner, make_kv_layout
from kvkeeper.engine_service.model import decoder, experts, loader
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.kernels import reference
from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.linear_float8 import Float8Weight
from kvkeeper.kernels.activations.linear_integers import IntegerWeight
from kvkeeper.kernels.types import LinearWeight
from tests.support.models.tiny_models import build_model_folder, random_tokens, tiny_model
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch
from tests.unit.kernels.gpu.pretend import PretendCuda, on_cuda, pretend_model_on_cuda, pretend_weights_on_cuda

pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp2"), pytest.mark.in_turn]
BLOCK_SIZE, NUM_BLOCKS = 16, 8
OFF_ROUNDED, OFF_FLOAT32 = 0.002, 0.15  # of few inputs, drawn wide


def logits_of(model, views_there):
    layout = make_kv_layout(model.config, model.dtype, BLOCK_SIZE)
    view = layout.view(torch.zeros(NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8)).fill_(float("nan"))
    runner = ModelRunner(model, on_cuda(view)[0] if views_there else view, layout)
    text, table = random_tokens(24, 1), torch.arange(1, 3).int().numpy()
    found = []
    for first, last in ((0, 20), (20, 21), (21, 24)):  # a prompt, a decode and a chunk
        batch = build_batch([ScheduledRow(text[first:last], first, table, WantLogits.ALL)], BLOCK_SIZE)
        found.append(runner.forward(batch).as_subclass(torch.Tensor))
    return torch.cat(found)


def exactly(x, weight):
    return reference.linear_float8(x, weight) if isinstance(weight, Float8Weight) else linear(x, weight)


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def there(monkeypatch):
    """A device of Hopper's kind; the interpreter multiplies no bfloat16, so all else is float32."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(loader, "compute_dtype", lambda *given, **options: torch.float32)
    pretend_model_on_cuda(monkeypatch)
    pretend_weights_on_cuda(monkeypatch)


def load_there(folder):
    model, _ = load_model(folder, dtype="fp8", progress=False)
    return model


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_are_those_of_what_is_rounded_alike_in_float64(name, tmp_path, monkeypatch, request):
    folder = build_model_folder(tmp_path, tiny_model(name))
    dense, _ = load_model(folder, dtype="float32", progress=False)
    exact = logits_of(dense, False)
    with monkeypatch.context() as patch:
        patch.setattr(loader, "compute_dtype", lambda *given, **options: torch.float32)
        rounded, _ = load_model(folder, dtype="fp8", progress=False)
        patch.setattr(decoder, "linear", exactly)
        patch.setattr(experts, "linear", exactly)
        expected = logits_of(rounded, False)
    request.getfixturevalue("there")
    model = load_there(folder)
    layer = model._layers[0]
    weights = [layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down]
    assert all(isinstance(weight, Float8Weight) and isinstance(weight.codes, PretendCuda) for weight in weights)
    assert isinstance(model._lm_head, LinearWeight)
    assert model._lm_head.data.dtype is model.dtype
    found = logits_of(model, True)
    assert relative_error(found, expected) < OFF_ROUNDED
    assert 0.01 < relative_error(found, exact) < OFF_FLOAT32  # and not float32 by another name


@pytest.mark.usefixtures("there")
def test_experts_are_integers_and_what_fits_no_tiles_stays(tmp_path):
    moe = load_there(build_model_folder(tmp_path / "moe", tiny_model("qwen3_moe")))
    mlp = moe._layers[0].mlp
    assert isinstance(moe._layers[0].qkv, Float8Weight)
    stacked = mlp.stacked.gate_up, mlp.stacked.down
    assert all(isinstance(weight, IntegerWeight) and weight.blocks.bits == 8 for weight in stacked)
    assert isinstance(mlp.router, LinearWeight)
    assert logits_of(moe, True).isfinite().all()
