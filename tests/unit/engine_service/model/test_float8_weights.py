"""Models of 8-bit floats: near float32, with the codes of checkpoints that have them, in their bytes, and refused elsewhere.

The engine refuses them on a CPU, where they are slow. Here the loader is told what it would compute in on a device, and the CPU
multiplies.
"""

import dataclasses
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvkeeper.engine_service.cache_session.kv_spec import make_kv_spec
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model import loader
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError, WeightsError
from kvkeeper.engine_service.model.decoder import LayerWeights
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.model.dtype_name import dtype_name
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.loading import filling
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from kvkeeper.engine_service.preflight import check_model
from kvkeeper.kernels.activations.linear_float8 import Float8Weight
from kvkeeper.kernels.types import LinearWeight
from tests.support.models import demo_corpus as corpus
from tests.support.models.quantised_models import FORMATS, build_both
from tests.support.models.tiny_models import (
    TINY_MODELS,
    NumericsCase,
    TinyModel,
    build_model_folder,
    choose_all_experts,
    random_tokens,
    tiny_model,
)
from tests.support.slices import todays
from tests.unit.engine_service.model.test_numerics import HandTables
from tests.unit.kernels.gpu.pretend import pretend_weights_on_cuda

torch.set_num_threads(1)
BY_NAME = {each.name: each for each in FORMATS}
NUM_LAYERS = 32
LONG = dataclasses.replace(
    tiny_model("llama"),
    overrides={"num_hidden_layers": NUM_LAYERS, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4,
               "num_key_value_heads": 4, "head_dim": 64},
)  # fmt: skip


@pytest.fixture
def computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "compute_dtype", lambda *given, **options: torch.bfloat16)


def logits_of(folder: Path, cases: list[NumericsCase], dtype: str) -> torch.Tensor:
    """[tokens of all cases, vocab_size]."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "compute_dtype", lambda *given, **options: torch.float32)
        model, _ = load_model(folder, dtype=dtype, progress=False)  # type: ignore[arg-type]
    return torch.cat(HandTables(model, 16).compute(cases, 64))


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model-0.safetensors") | load_file(folder / "model-1.safetensors")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_the_demo_model_says_much_the_same() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL_DIR)
    texts = [module.text for module in corpus.held_out_modules() if module.path in ("heapq.py", "queue.py", "textwrap.py")]
    cases = [NumericsCase(tuple(tokenizer.encode(text)[:256])) for text in texts]
    exact, found = (logits_of(DEMO_MODEL_DIR, cases, dtype) for dtype in ("float32", "fp8"))
    assert len(exact) == 3 * 256
    assert 0.01 < relative_error(found, exact) < 0.06  # and not float32 by another name
    assert float((found.argmax(1) == exact.argmax(1)).float().mean()) > 0.9


@pytest.mark.parametrize("model", todays(TINY_MODELS, 12), ids=lambda model: model.name)
def test_every_native_family_computes(model: TinyModel, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, model)
    choose_all_experts(folder)
    cases = [NumericsCase(random_tokens(length)) for length in (1, 33)]
    assert relative_error(logits_of(folder, cases, "fp8"), logits_of(folder, cases, "float32")) < 0.35


@pytest.mark.usefixtures("computes_in")
@pytest.mark.parametrize("stored", ["floats_by_channel", "floats_by_tensor", "fp8_by_tensor"])
def test_a_checkpoint_keeps_its_codes(stored: str, tmp_path: Path) -> None:
    packed, plain = build_both(tmp_path, tiny_model("llama"), BY_NAME[stored])
    tensors = stored_in(packed)
    model, _ = load_model(packed, dtype="fp8", progress=False)
    weight, module = model._layers[1].mlp.down, "model.layers.1.mlp.down_proj"  # type: ignore[union-attr]
    assert isinstance(weight, Float8Weight)
    codes, scales = tensors[f"{module}.weight"].float(), tensors[f"{module}.weight_scale"].reshape(-1, 1).float()
    powers = (scales / weight.scales.T).log2().round()
    assert torch.equal(weight.codes.float(), codes * 2**powers)
    assert float((scales / weight.scales.T / 2**powers - 1).abs().max()) < 2**-9
    meant = load_file(plain / "model.safetensors")[f"{module}.weight"]
    found = weight.codes.float() * weight.scales.T
    assert relative_error(found, meant) < relative_error(meant.bfloat16().float(), meant)


@pytest.mark.usefixtures("computes_in")
def test_a_load_takes_the_bytes_of_a_checkpoint_of_8_bit_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are alive where a layer is packed: all that is packed, and one layer in 16 bits."""
    packed, _ = build_both(tmp_path, LONG, BY_NAME["floats_by_channel"])
    stored = stored_in(packed)
    for path in packed.glob("model*"):  # of which each has a half of every weight
        path.unlink()
    save_file(stored, packed / "model.safetensors")
    num_bytes = sum(
        tensor.numel() * (4 if name.endswith("scale") else min(tensor.itemsize, 2)) for name, tensor in stored.items()
    )
    dense: list[weakref.ref[torch.Tensor]] = []
    found: list[int] = []
    allocate = filling._allocate
    made_bytes = 0

    def noted(*shape: int, **kind: torch.dtype) -> torch.Tensor:
        tensor = allocate(*shape, **kind)  # type: ignore[arg-type]
        dense.append(weakref.ref(tensor))
        return tensor

    class Watched(filling.Packing):
        def finish_layer(self, layer: LayerWeights) -> LayerWeights:
            nonlocal made_bytes
            made = super().finish_layer(layer)
            weights = [made.qkv, made.o, made.mlp.gate_up, made.mlp.down]  # type: ignore[union-attr]
            for weight in weights:
                assert isinstance(weight, Float8Weight)
                made_bytes += weight.codes.nbytes + weight.scales.nbytes
            found.append(made_bytes + sum(each.nbytes for each in (ref() for ref in dense) if each is not None))
            return made

    monkeypatch.setattr(filling, "_allocate", noted)
    monkeypatch.setattr(loader, "Packing", Watched)
    model, _ = load_model(packed, dtype="fp8", progress=False)
    assert len(found) == NUM_LAYERS
    assert max(found) < 1.1 * num_bytes
    used = made_bytes + sum(each.nbytes for each in (ref() for ref in dense) if each is not None)
    assert used < 1.01 * num_bytes
    said = check_model(packed, EngineConfig(model=str(packed), dtype="fp8", device="cuda"))
    assert used < said.weights < 1.07 * used
    assert model.config.num_layers == NUM_LAYERS


@pytest.mark.usefixtures("computes_in")
def test_sides_that_are_not_multiplied_so_and_the_head_stay(tmp_path: Path) -> None:
    odd = dataclasses.replace(tiny_model("llama"), overrides={"intermediate_size": 120})
    model, _ = load_model(build_model_folder(tmp_path, odd), dtype="fp8", progress=False)
    layer = model._layers[0]
    weights = layer.mlp.down, model._lm_head  # type: ignore[union-attr]
    assert all(isinstance(weight, LinearWeight) for weight in weights)
    assert isinstance(layer.mlp.gate_up, Float8Weight)  # type: ignore[union-attr]
    assert model.dtype is torch.bfloat16


@pytest.mark.usefixtures("computes_in")
def test_the_cache_keeps_them_apart(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, TINY_MODELS[0])
    spec = make_kv_spec(load_served_model(EngineConfig(model=str(folder), dtype="fp8", progress=False)), 4)
    assert spec.compute_dtype == "fp8"


def test_all_else_is_bfloat16_and_a_cpu_is_refused(tmp_path: Path) -> None:
    for stored in ("float16", "bfloat16", None):
        assert dtype_name(stored, "cuda", "fp8", has_bfloat16=False) == "bfloat16"
    folder = build_model_folder(tmp_path, TINY_MODELS[0])
    said = "dtype 'fp8' is not supported; supported: on a CPU int8, which is faster there; fp8 is for --device cuda"
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(folder, dtype="fp8", progress=False)
    with pytest.raises(UnsupportedModelError, match=said):
        check_model(folder, EngineConfig(model=str(folder), dtype="fp8"))
    assert check_model(folder, EngineConfig(model=str(folder), dtype="fp8", device="cuda")).dtype == "fp8"


def test_a_model_of_the_library_is_refused(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, TinyModel("gpt_neox", "GPTNeoX"))
    config = EngineConfig(model=str(folder), dtype="fp8", device="cuda", progress=False)
    for refuse in (lambda: check_model(folder, config), lambda: load_served_model(dataclasses.replace(config, device="cpu"))):
        with pytest.raises(UnsupportedModelError, match="dtype 'fp8' is not supported; supported: the native families"):
            refuse()


@pytest.mark.usefixtures("computes_in")
def test_a_device_without_such_products_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_model_folder(tmp_path, TINY_MODELS[0])
    pretend_weights_on_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    said = "dtype 'fp8' is not supported; supported: devices of compute capability 8.9 or later; int8 is for all"
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(folder, dtype="fp8", progress=False)


@pytest.mark.usefixtures("computes_in")
def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_model_folder(tmp_path, TINY_MODELS[0])
    read = loader.iterate_tensors

    def spoiled(*given):  # type: ignore[no-untyped-def]
        for file, name, tensor in read(*given):
            if name == "model.layers.1.mlp.down_proj.weight":
                tensor = tensor.clone()
                tensor[0, 0] = torch.nan
            yield file, name, tensor

    monkeypatch.setattr(loader, "iterate_tensors", spoiled)
    with pytest.raises(WeightsError, match="--dtype fp8: weights must be finite"):
        load_model(folder, dtype="fp8", progress=False)
