"""Models with products of 8-bit integers: close to float32, kept apart from it in the cache, and refused where it cannot be."""

from pathlib import Path

import pytest
import torch

from kvkeeper.engine_service.cache_session.kv_spec import make_kv_spec
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.model.dtype_name import dtype_name
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from kvkeeper.kernels.activations import linear_int8
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
pytestmark = pytest.mark.usefixtures("kernel_path")


def both_logits(folder: Path, cases: list[NumericsCase]) -> list[torch.Tensor]:
    """Of float32 and of int8, [tokens of all cases, vocab_size]."""
    found = []
    for dtype in ("float32", "int8"):
        model, _ = load_model(folder, dtype=dtype, progress=False)
        found.append(torch.cat(HandTables(model, 16).compute(cases, 64)))
    return found


def test_the_demo_model_says_much_the_same() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL_DIR)
    texts = [module.text for module in corpus.held_out_modules() if module.path in ("heapq.py", "queue.py", "textwrap.py")]
    exact, found = both_logits(DEMO_MODEL_DIR, [NumericsCase(tuple(tokenizer.encode(text)[:256])) for text in texts])
    assert len(exact) == 3 * 256
    assert 1e-3 < float((found - exact).norm() / exact.norm()) < 0.04  # and not float32 by another name
    assert float((found.argmax(1) == exact.argmax(1)).float().mean()) > 0.93


@pytest.mark.parametrize("model", TINY_MODELS, ids=lambda model: model.name)
def test_every_native_family_computes(model: TinyModel, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, model)
    choose_all_experts(folder)
    exact, found = both_logits(folder, [NumericsCase(random_tokens(length)) for length in (1, 33)])
    assert float((found - exact).norm() / exact.norm()) < 0.1


def test_the_cache_keeps_it_apart_from_float32(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, TINY_MODELS[0])
    exact, found = (
        make_kv_spec(load_served_model(EngineConfig(model=str(folder), dtype=dtype, progress=False)), 4)
        for dtype in ("float32", "int8")
    )
    assert (exact.compute_dtype, found.compute_dtype) == ("float32", "int8")
    exact.compute_dtype = found.compute_dtype
    assert exact == found


def test_it_is_for_a_cpu_and_never_a_config_s_choice() -> None:
    assert dtype_name("bfloat16", "cpu", "int8", has_bfloat16=True) == "int8"
    assert dtype_name("int8", "cpu", "auto", has_bfloat16=True) == "float32"
    for device, choice in (("cuda", "int8"), ("cuda", "auto")):
        with pytest.raises(UnsupportedModelError, match="int8 on cuda"):
            dtype_name("int8", device, choice, has_bfloat16=True)


def test_a_model_of_the_library_is_refused(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, TinyModel("gpt_neox", "GPTNeoX"))
    with pytest.raises(UnsupportedModelError, match="dtype 'int8' is not supported; supported: the native families"):
        load_served_model(EngineConfig(model=str(folder), dtype="int8", progress=False))


def test_a_cpu_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    compiled.switch(on=False)  # the kernels multiply on any
    monkeypatch.setattr(linear_int8, "_multiply", refuse)
    with pytest.raises(UnsupportedModelError, match="'int8' is not supported; supported: CPUs for which torch has FBGEMM"):
        load_model(build_model_folder(tmp_path, TINY_MODELS[0]), dtype="int8", progress=False)
