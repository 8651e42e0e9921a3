"""Quantised checkpoints: each format gives the logits of the weights that it means, and what is not read is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.errors import ModelConfigError, ModelError, UnsupportedModelError, WeightsError
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.quantised.scheme import METHODS, parse_scheme
from kvkeeper.engine_service.preflight import check_model
from tests.support.documents.markdown import ROOT
from tests.support.models.quantised_models import FORMATS, MXFP4, Quantised, build_both
from tests.support.models.tiny_models import NumericsCase, TinyModel, random_tokens, tiny_model
from tests.unit.engine_service.model.test_numerics import HandTables

torch.set_num_threads(1)
PAGE = ROOT / "docs" / "operate" / "models.md"
BY_NAME = {each.name: each for each in (*FORMATS, MXFP4)}
CASES = [(each, tiny_model("llama")) for each in FORMATS] + [(MXFP4, tiny_model("gpt_oss"))]
IDS = [each.name for each, _ in CASES]


def logits(folder: Path) -> torch.Tensor:
    model, _ = load_model(folder, progress=False)
    return torch.cat(HandTables(model, 16).compute([NumericsCase(random_tokens(length)) for length in (1, 33)], 64))


def expect_same(packed: Path, plain: Path) -> None:
    found, expected = logits(packed), logits(plain)
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert torch.equal(found.argmax(1), expected.argmax(1))


@pytest.mark.parametrize(("stored", "model"), CASES, ids=IDS)
def test_each_format_gives_the_logits_of_the_weights_that_it_means(stored: Quantised, model: TinyModel, tmp_path: Path) -> None:
    expect_same(*build_both(tmp_path, model, stored))


@pytest.mark.parametrize("model", ["phi3_window_partial", "qwen3_moe", "mixtral", "qwen2", "gemma3"])
@pytest.mark.parametrize("stored", ["awq", "packed_4_uneven", "fp8_by_block"])
def test_every_kind_of_projection_may_be_quantised(model: str, stored: str, tmp_path: Path) -> None:
    expect_same(*build_both(tmp_path, tiny_model(model), BY_NAME[stored]))


@pytest.mark.parametrize("model", ["deepseek_v2", "deepseek_v3", "nemotron_3_super"])
def test_latent_attention_and_recurrent_layers_in_fp8(model: str, tmp_path: Path) -> None:
    """What makes keys and values of latents is used head by head, and stored as one projection, as all of Mamba 2 is."""
    expect_same(*build_both(tmp_path, tiny_model(model), BY_NAME["fp8_by_block"]))


def test_modules_that_are_not_quantised_stay_as_they_are(tmp_path: Path) -> None:
    expect_same(*build_both(tmp_path, tiny_model("llama"), BY_NAME["gptq"], skipped="layers.0."))


def test_scales_of_activations_keys_and_values_are_not_weights(tmp_path: Path) -> None:
    packed, plain = build_both(tmp_path, tiny_model("llama"), BY_NAME["fp8_by_tensor"])
    change(packed, lambda tensors: tensors.update({
        "model.layers.0.self_attn.q_proj.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1),
    }))  # fmt: skip
    expect_same(packed, plain)


@pytest.mark.parametrize(("stored", "model"), CASES, ids=IDS)
def test_what_a_model_takes_is_counted_in_its_weights(stored: Quantised, model: TinyModel, tmp_path: Path) -> None:
    packed, plain = build_both(tmp_path, model, stored)
    found, expected = (EngineConfig(model=str(folder), progress=False) for folder in (packed, plain))
    assert load_served_model(found).num_parameters == load_served_model(expected).num_parameters
    assert check_model(packed, found).weights == check_model(plain, expected).weights


def change(folder: Path, how: Any) -> None:
    path = folder / "model-0.safetensors"
    tensors = load_file(path)
    how(tensors)
    save_file(tensors, path)
    index = folder / "model.safetensors.index.json"
    places = {name: place for name, place in json.loads(index.read_text())["weight_map"].items() if place != path.name}
    index.write_text(json.dumps({"weight_map": places | dict.fromkeys(tensors, path.name)}))


def replaced(part: str, value: torch.Tensor) -> Any:
    def how(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith((f".{part}", f"_proj_{part}")))
        tensors[name] = value

    return how


def dropped(part: str) -> Any:
    def how(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[next(name for name in tensors if name.endswith((f".{part}", f"_proj_{part}")))]

    return how


@pytest.mark.parametrize(
    ("stored", "how", "said"),
    [
        ("gptq", dropped("qzeros"), "is stored without qzeros"),
        ("gptq", replaced("g_idx", torch.full((64,), 4, dtype=torch.int32)), "g_idx must name one of 4 groups for each of 64"),
        ("awq", replaced("scales", torch.ones(3, 3)), "scales has the shape"),
        ("awq", replaced("qweight", torch.ones(64, 8)), "qweight is torch.float32"),
        ("packed_4", replaced("weight_shape", torch.tensor([1])), "weight_shape has 1 numbers"),
        ("packed_4", replaced("weight_shape", torch.tensor([1 << 40, 64])), "weight_packed holds"),
        ("integers_uneven", replaced("weight_zero_point", torch.ones(3)), "zero points have the shape"),
        ("fp8_by_block", replaced("weight_scale_inv", torch.ones(1, 2)), "weight_scale_inv has the shape"),
        ("mxfp4", dropped("scales"), "is stored without scales"),
        ("mxfp4", replaced("blocks", torch.ones(6, 64, 2, 8, dtype=torch.uint8)), "blocks are torch.uint8"),
        ("mxfp4", replaced("scales", torch.ones(6, 64, dtype=torch.uint8)), "scales are torch.uint8"),
        (
            "mxfp4",
            lambda tensors: [each.fill_(255) for name, each in tensors.items() if name.endswith("_scales")],
            "not a number",
        ),
    ],
)
def test_a_damaged_weight_is_named(stored: str, how: Any, said: str, tmp_path: Path) -> None:
    packed, _ = build_both(tmp_path, tiny_model("gpt_oss" if stored == "mxfp4" else "llama"), BY_NAME[stored])
    change(packed, how)
    with pytest.raises(WeightsError, match=said):
        load_model(packed, progress=False)


GPTQ, AWQ, PACKED = (BY_NAME[name].said for name in ("gptq", "awq", "packed_4"))
WEIGHTS = PACKED["config_groups"]["group_0"]["weights"]


def with_outputs(said: dict[str, Any]) -> dict[str, Any]:
    return PACKED | {"config_groups": {"a": {"weights": WEIGHTS, "output_activations": said}}}


def with_weights(**changes: Any) -> dict[str, Any]:
    return PACKED | {"config_groups": {"group_0": {"weights": WEIGHTS | changes}}}


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        ([], ModelConfigError, "must be an object"),
        ({"bits": 4}, UnsupportedModelError, "quantization_config.quant_method None"),
        ({"quant_method": "bitsandbytes"}, UnsupportedModelError, "quant_method 'bitsandbytes'"),
        (GPTQ | {"bits": 3}, UnsupportedModelError, "bits 3 is not supported; supported: 4, 8"),
        (GPTQ | {"bits": "4"}, UnsupportedModelError, "bits '4'"),
        (GPTQ | {"checkpoint_format": "marlin"}, UnsupportedModelError, "checkpoint_format 'marlin'"),
        (GPTQ | {"group_size": 0}, ModelConfigError, "group_size must be -1 or a positive integer, is 0"),
        (AWQ | {"version": "gemv"}, UnsupportedModelError, "version 'gemv'"),
        (AWQ | {"zero_point": False}, UnsupportedModelError, "zero_point False"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, UnsupportedModelError, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ModelConfigError, "two sides of a block"),
        (PACKED | {"format": "marlin-24"}, UnsupportedModelError, "format 'marlin-24'"),
        (PACKED | {"sparsity_config": {"format": "sparse-24"}}, UnsupportedModelError, "sparsity_config"),
        (PACKED | {"transform_config": {"u": {}}}, UnsupportedModelError, "transform_config"),
        (PACKED | {"config_groups": {}}, ModelConfigError, "config_groups"),
        (PACKED | {"config_groups": {"a": {"weights": None}}}, ModelConfigError, "how weights are stored"),
        (with_outputs({}), None, ""),
        (with_outputs({"num_bits": 8}), UnsupportedModelError, "output_activations"),
        (with_weights(num_bits=2), UnsupportedModelError, "num_bits 2"),
        (with_weights(strategy="tensor_group"), UnsupportedModelError, "strategy 'tensor_group'"),
        (with_weights(dynamic=True), UnsupportedModelError, "dynamic True"),
        (with_weights(type="float", num_bits=8), UnsupportedModelError, "format 'pack-quantized'"),
        (
            PACKED | {"config_groups": {"a": {"weights": WEIGHTS}, "b": {"weights": WEIGHTS | {"num_bits": 8}}}},
            UnsupportedModelError,
            "2 kinds of weights",
        ),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_its_name(said: Any, error: type[ModelError] | None, text: str) -> None:
    if error is None:
        assert parse_scheme({"quantization_config": said}) is not None
        return
    with pytest.raises(error, match=text):
        parse_scheme({"quantization_config": said})


def test_the_page_of_models_names_each_method() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `") and line.count("|") == 4]
    assert [row.split("`")[1] for row in rows if row.split("`")[1] in METHODS] == sorted(METHODS)
    for each in BY_NAME.values():
        said = each.said.get("format", each.said["quant_method"])
        assert f"`{said}`" in PAGE.read_text()


def test_a_family_that_is_not_native_is_refused_as_a_quantised_one(tmp_path: Path) -> None:
    packed, _ = build_both(tmp_path, tiny_model("llama"), BY_NAME["awq"])
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"model_type": "gpt_neox"}))
    with pytest.raises(UnsupportedModelError, match="quantization_config with model type 'gpt_neox'"):
        load_served_model(EngineConfig(model=str(packed), progress=False))
