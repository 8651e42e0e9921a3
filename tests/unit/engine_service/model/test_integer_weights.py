"""Models whose weights are integers: close to float32, kept apart from it in the cache, and refused where they cannot be."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvkeeper.engine_service.cache_session.kv_spec import make_kv_spec
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError, WeightsError
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.model.dtype_name import DtypeChoice, dtype_name
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from kvkeeper.kernels.cpu import compiled
from tests.support.models import demo_corpus as corpus
from tests.support.models.tiny_models import (
    TINY_MODELS,
    NumericsCase,
    TinyModel,
    build_model_folder,
    choose_all_experts,
    random_tokens,
)
from tests.unit.engine_service.model.test_numerics import HandTables

torch.set_num_threads(1)
pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    compiled.switch(on=True)
    yield
    compiled.switch(on=False)


def both_logits(folder: Path, cases: list[NumericsCase], bits: DtypeChoice) -> list[torch.Tensor]:
    """Of float32 and of integers, [tokens of all cases, vocab_size]."""
    found = []
    choices: tuple[DtypeChoice, DtypeChoice] = ("float32", bits)
    for dtype in choices:
        model, _ = load_model(folder, dtype=dtype, progress=False)
        found.append(torch.cat(HandTables(model, 16).compute(cases, 64)))
    return found


@pytest.mark.parametrize(("bits", "most", "same"), [("int8", 0.02, 0.97), ("int4", 0.2, 0.8)])
def test_the_demo_model_says_much_the_same(bits: DtypeChoice, most: float, same: float) -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL_DIR)
    texts = [module.text for module in corpus.held_out_modules() if module.path in ("heapq.py", "queue.py", "textwrap.py")]
    exact, found = both_logits(DEMO_MODEL_DIR, [NumericsCase(tuple(tokenizer.encode(text)[:256])) for text in texts], bits)
    assert len(exact) == 3 * 256
    assert 1e-3 < float((found - exact).norm() / exact.norm()) < most  # and not float32 by another name
    assert float((found.argmax(1) == exact.argmax(1)).float().mean()) > same


@pytest.mark.parametrize(("bits", "most"), [("int8", 0.06), ("int4", 0.5)])
@pytest.mark.parametrize("model", TINY_MODELS, ids=lambda model: model.name)
def test_every_native_family_computes(model: TinyModel, bits: DtypeChoice, most: float, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, model)
    choose_all_experts(folder)
    exact, found = both_logits(folder, [NumericsCase(random_tokens(length)) for length in (1, 33)], bits)
    assert float((found - exact).norm() / exact.norm()) < most


def test_the_cache_keeps_each_apart(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, TINY_MODELS[0])
    specs = [
        make_kv_spec(load_served_model(EngineConfig(model=str(folder), dtype=dtype, progress=False)), 4)
        for dtype in ("float32", "int8", "int4")
    ]
    assert [spec.compute_dtype for spec in specs] == ["float32", "int8", "int4"]
    for spec in specs:
        spec.compute_dtype = "float32"
    assert specs[0] == specs[1] == specs[2]


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_all_else_is_float32_on_a_cpu_and_as_stored_on_a_device(bits: str) -> None:
    assert dtype_name("bfloat16", "cpu", bits, has_bfloat16=True) == "float32"
    assert dtype_name("float16", "cuda", bits, has_bfloat16=True) == "float16"
    assert dtype_name(None, "cuda", bits, has_bfloat16=True) == "bfloat16"


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_they_are_never_a_config_s_choice(bits: str) -> None:
    assert dtype_name(bits, "cpu", "auto", has_bfloat16=True) == "float32"
    for choice in (bits, "auto"):
        with pytest.raises(UnsupportedModelError, match=f"dtype '{bits}' is not supported"):
            dtype_name(bits, "cuda", choice, has_bfloat16=True)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_model_of_the_library_is_refused(bits: str, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, TinyModel("gpt_neox", "GPTNeoX"))
    with pytest.raises(UnsupportedModelError, match=f"dtype '{bits}' is not supported; supported: the native families"):
        load_served_model(EngineConfig(model=str(folder), dtype=bits, progress=False))


def test_without_the_compiled_kernels_they_are_refused(tmp_path: Path) -> None:
    compiled.switch(on=False)
    with pytest.raises(UnsupportedModelError, match="'int4' is not supported; supported: the compiled kernels"):
        load_model(build_model_folder(tmp_path, TINY_MODELS[0]), dtype="int4", progress=False)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_weight_that_is_not_finite_is_refused(bits: DtypeChoice, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, TINY_MODELS[0])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=f"--dtype {bits}: weights must be finite"):
        load_model(folder, dtype=bits, progress=False)
