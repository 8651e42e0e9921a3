"""Models that the transformers library computes, on the paged arena: held to the library's own logits; and what is refused."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kvkeeper.engine_service.cache_session.kv_spec import make_kv_spec
from kvkeeper.engine_service.compute.self_check import load_checked_model
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.errors import ModelError, UnsupportedModelError
from kvkeeper.engine_service.preflight import check_model
from tests.support.models.architectures import build_architecture
from tests.support.models.tiny_models import (
    NumericsCase,
    TinyModel,
    build_model_folder,
    numerics_cases,
    random_tokens,
    reference_logits,
)
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch
from tests.unit.engine_service.model.test_numerics import HandTables

torch.set_num_threads(1)

MODELS = (
    TinyModel("gpt_neox", "GPTNeoX"),
    TinyModel("phi3", "Phi3", {"pad_token_id": 0}),
    TinyModel("olmo2", "Olmo2"),
    TinyModel("starcoder2", "Starcoder2", {"sliding_window": 8}),
    TinyModel("granite", "Granite"),
    TinyModel("opt", "OPT", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    TinyModel("mixtral", "Mixtral", {"num_local_experts": 2}),
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_logits_are_those_of_transformers(model: TinyModel, tmp_path: Path) -> None:
    folder, cases = build_model_folder(tmp_path, model), numerics_cases(4)
    reference = reference_logits(folder, cases)
    loaded = load_checked_model(folder, model.name, "float32", device=torch.device("cpu"), progress=False)
    assert loaded.config.windows == ((8, 8) if model.name == "starcoder2" else (None, None))
    for chunk_size in (1, 7):
        assert reference.error(HandTables(loaded, 4).compute(cases, chunk_size)) <= reference.bound


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def test_an_engine_serves_one(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, MODELS[0])
    served = load_served_model(EngineConfig(model=str(folder), progress=False))
    assert (served.architecture, served.vocab_size, served.max_len) == ("GPTNeoXForCausalLM", 512, 512)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert served.num_parameters == sum(parameter.numel() for parameter in network.parameters())
    spec = make_kv_spec(served, 4)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (2, 4, 16)
    assert served.refuses_retention, "the library rotates the queries, once"


@pytest.mark.parametrize(
    "model",
    [
        TinyModel("llama_gelu", "Llama", {"hidden_act": "gelu"}),
        TinyModel("granite_relu", "Granite", {"hidden_act": "relu", "attention_multiplier": 0.3}),
        TinyModel("qwen3_moe_gelu", "Qwen3Moe", {"hidden_act": "gelu", **EXPERTS}),
    ],
    ids=lambda model: model.name,
)
def test_what_a_native_family_has_not_runs_through_the_library(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cases = build_model_folder(tmp_path, model), (NumericsCase(random_tokens(60)),)
    served = load_served_model(EngineConfig(model=str(folder), progress=False))
    assert served.refuses_retention, "the library rotates the queries, once"
    assert served.max_len == 512
    layout = served.layout(4)
    memory = torch.zeros(17 * layout.block_bytes, dtype=torch.uint8)
    runner = served.make_runner(layout.view(memory), layout)
    row = ScheduledRow(cases[0].tokens, 0, np.arange(1, 16, dtype=np.int32), WantLogits.ALL)
    reference = reference_logits(folder, cases)
    assert reference.error([runner.forward(build_batch([row], 4))]) <= reference.bound
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModelError, match=r"gelu|relu"):
        load_served_model(EngineConfig(model=str(folder), progress=False))


@pytest.mark.parametrize(
    "model",
    [
        TinyModel("gpt_oss", "GptOss", {"hidden_act": "gelu"}),  # attention sinks, and experts that only the library has
        TinyModel("mamba", "Mamba", {"state_size": 4}),  # a recurrent state
        TinyModel("bloom", "Bloom", {"n_head": 4, "n_layer": 2}),  # not through the attention interface
    ],
    ids=lambda model: model.name,
)
def test_what_cannot_be_paged_is_refused_at_load(model: TinyModel, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, model)
    with pytest.raises(UnsupportedModelError, match="supported:"):
        load_served_model(EngineConfig(model=str(folder), progress=False))


@pytest.mark.parametrize(
    ("model_type", "cause"),
    [
        ("bloom", "it adds a bias by distance to attention scores (ALiBi)"),
        ("falcon", "its attention is code of its own"),
        ("mpt", "it adds a bias by distance to attention scores (ALiBi)"),
        ("lfm3", "2 of its 2 layers keep a state of their own for each sequence (conv)"),
        ("olmo_hybrid", "1 of its 2 layers keep a state of their own for each sequence (linear_attention)"),
        ("rwkv", "its layers keep a state of their own for each sequence"),
        ("mimo_v2_flash", "values "),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the library's slow paths
def test_a_refusal_names_its_cause(model_type: str, cause: str, tmp_path: Path) -> None:
    folder = build_architecture(model_type, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"is not supported: .*; supported: ") as refused:
        load_served_model(EngineConfig(model=str(folder), progress=False))
    assert cause in str(refused.value)


def test_a_misspelt_type_is_told_what_is_close_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(UnsupportedModelError, match=r"transformers [0-9.]+ does not know it; .* \('llama' is close to it\)$"):
        load_served_model(EngineConfig(model=str(tmp_path), progress=False))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"youtu \('llama' is close to it\); and what .* install "):
        check_model(tmp_path, EngineConfig(model=str(tmp_path), progress=False))


@pytest.mark.parametrize("model_type", ["nobody_s", "t5"])
def test_what_is_no_decoder_is_refused(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    with pytest.raises(UnsupportedModelError, match="model type"):
        load_served_model(EngineConfig(model=str(tmp_path), progress=False))


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModelError, match=r" install .*transformers"):
        load_checked_model(tmp_path, "opt", "auto", device=torch.device("cpu"), progress=False)


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, MODELS[0])
    (folder / "model.safetensors").unlink()
    network = transformers.GPTNeoXForCausalLM(transformers.AutoConfig.from_pretrained(folder))
    torch.save(network.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError):
        load_served_model(EngineConfig(model=str(folder), progress=False))
