"""A released checkpoint as it comes: its text model is served, whatever it is wrapped in, and the rest is left out by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvkeeper.engine_service.compute.self_check import load_checked_model
from kvkeeper.engine_service.compute.served_model import load_served_model, most_tokens
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.errors import ModelConfigError, UnsupportedModelError, WeightsError
from kvkeeper.engine_service.model.checkpoint.text_part import other_part, text_name, unwrap
from kvkeeper.engine_service.model.config import parse_model_config, read_model_config
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.model.families.default_sizes import DEFAULT_SIZES
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.outputs.tokenizer_folder import read_tokenizer
from kvkeeper.engine_service.preflight import check_model
from tests.support.models.quantised_models import FORMATS, build_both
from tests.support.models.tiny_models import NumericsCase, TinyModel, build_model_folder, random_tokens, tiny_model
from tests.support.models.wrapped import STYLES, WEIGHTS, build_whole, whole_logits, wrap
from tests.support.worlds.hand_tables import HandTables
from tests.unit.engine_service.model.test_unneeded import of_each_family

torch.set_num_threads(1)

CASES = [NumericsCase(random_tokens(24)), NumericsCase(random_tokens(5, vocab_size=96))]
LLAMA = tiny_model("llama")


def logits(folder: Path) -> list[torch.Tensor]:
    return HandTables(load_model(folder, progress=False)[0], 16).compute(CASES, 64)


def served(folder: Path) -> Any:
    return load_served_model(EngineConfig(model=str(folder), progress=False, block_size=16))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("model", of_each_family(), ids=lambda model: model.name)
def test_a_wrapped_model_is_the_model(model: TinyModel, style: str, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, model)
    alone, num_parameters = logits(folder), served(folder).num_parameters
    wrap(folder, style)
    with capture_logs() as told:
        found = logits(folder)
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))
    lines = [(line["num_tensors"], line["reason"]) for line in told if line["event"] == "tensors_left_out"]
    assert sorted(lines) == [
        (1, "is of multi_modal_projector, and the text part of any_vl is served"),
        (2, "is of model.visual, and the text part of any_vl is served"),
    ]
    assert served(folder).num_parameters == num_parameters
    assert served(folder).text_part_of == "any_vl"


# What stands in the config of the text model, of the tiny ones; and the layers of towers come from the library.
WHOLE: dict[str, dict[str, Any]] = {
    "aya_vision": {"sliding_window": 8},
    "cohere2_vision": {"sliding_window": 8},
    "exaone4_5": {"sliding_window": 8},
    "gemma3": tiny_model("gemma3").overrides,
    "idefics3": {},
    "internvl": {},
    "lighton_ocr": {},
    "llama4": tiny_model("llama4").overrides,
    "llava": {},
    "llava_next": {},
    "mistral3": {},
    "qwen2_5_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "qwen2_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "qwen3_5": tiny_model("qwen3_5_27b").overrides,
    "qwen3_5_moe": tiny_model("qwen3_5_35b_a3b").overrides,
    "qwen3_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "smolvlm": {},
}
BY_LIBRARY = {"aya_vision", "cohere2_vision", "exaone4_5"}
LOGIT_SCALES = {"aya_vision": 0.0625, "cohere2_vision": 0.0625}  # of their text model, which the whole one leaves out
TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("model_type", WHOLE)
@pytest.mark.filterwarnings("ignore")  # of the library's configs and of its slow paths
def test_the_text_part_has_the_logits_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    folder = build_whole(tmp_path, model_type, TEXT | WHOLE[model_type])
    expected = whole_logits(folder, CASES)
    with capture_logs() as told:
        model: Any
        if model_type in BY_LIBRARY:
            text_type = read_type(folder)
            model = load_checked_model(folder, text_type, "float32", device=torch.device("cpu"), progress=False)
        else:
            model, config = load_model(folder, progress=False)
            assert config.wrapper == model_type
    for ours, theirs in zip(HandTables(model, 16).compute(CASES, 7), expected, strict=True):
        torch.testing.assert_close(ours, theirs * LOGIT_SCALES.get(model_type, 1.0), atol=1e-5, rtol=0)
    left_out = sum(line["num_tensors"] for line in told if line["event"] == "tensors_left_out")
    assert left_out == sum(bool(other_part(name)) for name in load_file(folder / WEIGHTS)) > 0
    assert served(folder).text_part_of == model_type
    assert most_tokens(EngineConfig(model=str(folder))) == 512
    assert check_model(folder, EngineConfig(model=str(folder))).weights < 8 * served(folder).num_parameters


def read_type(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["text_config"]["model_type"])


def test_the_outer_setting_counts_where_both_speak(tmp_path: Path) -> None:
    inner = {"model_type": "llama", "tie_word_embeddings": False, "dtype": "float16", "eos_token_id": 5, "vocab_size": 9}
    raw = {"model_type": "any_vl", "text_config": inner, "torch_dtype": "bfloat16", "vocab_size": 7}
    found = unwrap(raw | {"tie_word_embeddings": True, "architectures": ["AnyForConditionalGeneration"]})
    assert (found["tie_word_embeddings"], found["dtype"], found["eos_token_id"]) == (True, "bfloat16", 5)
    assert (found["vocab_size"], found["architectures"], found["wrapped_in"]) == (9, ["AnyForConditionalGeneration"], "any_vl")
    assert unwrap(found) == found
    assert unwrap(raw)["tie_word_embeddings"] is False
    assert unwrap(raw | {"eos_token_id": [6]})["eos_token_id"] == [6]
    folder = wrap(build_model_folder(tmp_path, TinyModel("tied", "Llama", {"tie_word_embeddings": True})), style="inside")
    raw = json.loads((folder / "config.json").read_text())
    edit_config(folder, text_config=raw["text_config"] | {"tie_word_embeddings": False}, tie_word_embeddings=True)
    assert load_model(folder, progress=False)[1].tied_embeddings
    edit_config(folder, architectures=["AnyForConditionalGeneration"])
    assert served(folder).architecture == "AnyForConditionalGeneration"


@pytest.mark.parametrize("family", DEFAULT_SIZES)
def test_what_a_text_part_leaves_out_is_its_types_default(family: str) -> None:
    """As config.json of Gemma 3 does, which has no heads and no vocabulary; a model alone has to say it."""
    defaults = CONFIG_MAPPING[family]()
    said = DEFAULT_SIZES[family]
    assert {key: getattr(defaults, key) for key in said} == said
    text = {"model_type": family, "num_experts_per_tok": 1, "num_local_experts": 2, "n_routed_experts": 64}
    text |= {"intermediate_size_mlp": 4, "moe_intermediate_size": 4}
    config = parse_model_config({"model_type": "any_vl", "text_config": text})
    assert (config.vocab_size, config.num_layers) == (said["vocab_size"], said["num_hidden_layers"])
    with pytest.raises(ModelConfigError, match=r"must be a positive integer below 2\*\*31, is None"):
        parse_model_config(text)


@pytest.mark.parametrize("stored", [each for each in FORMATS if each.name in ("gptq", "awq", "packed_4", "fp8_by_block")])
@pytest.mark.parametrize("style", ["inside", "around"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5_35b_a3b"])
def test_weights_in_fewer_bits_are_unwrapped_too(name: str, style: str, stored: Any, tmp_path: Path) -> None:
    """Their experts are stored one by one. The setting of how they are stored stands outside, or with the text model."""
    packed, _ = build_both(tmp_path, tiny_model(name), stored)
    expected = logits(packed)
    said = json.loads((packed / "config.json").read_text())["quantization_config"]
    wrap(packed, style, **({"quantization_config": said} if style == "inside" else {}))
    assert read_model_config(packed).scheme is not None
    assert all(torch.equal(a, b) for a, b in zip(expected, logits(packed), strict=True))


def test_a_tensor_of_the_text_part_is_never_left_out(tmp_path: Path) -> None:
    folder = wrap(build_model_folder(tmp_path, LLAMA))
    tensors = load_file(folder / WEIGHTS)
    for name, said in (
        ("model.language_model.odd.weight", r"tensor model\.odd\.weight is not part of"),
        ("model.layers.0.odd.weight", r"tensor model\.layers\.0\.odd\.weight is not part of"),
        ("model.norm.weight", r"tensor model\.norm\.weight is stored twice"),
    ):
        save_file(tensors | {name: torch.ones(64)}, folder / WEIGHTS)
        with pytest.raises(WeightsError, match=said):
            load_model(folder, progress=False)


def test_towers_are_left_out_of_what_wraps_a_text_model_alone(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, LLAMA)
    save_file(load_file(folder / WEIGHTS) | {"visual.x": torch.ones(1)}, folder / WEIGHTS)
    with pytest.raises(WeightsError, match=r"tensor visual\.x is not part of"):
        load_model(folder, progress=False)


@pytest.mark.parametrize(
    ("stored", "own", "part"),
    [
        ("model.language_model.layers.0.mlp.gate_proj.qweight", "model.layers.0.mlp.gate_proj.qweight", ""),
        ("language_model.model.norm.weight", "model.norm.weight", ""),
        ("language_model.lm_head.weight", "lm_head.weight", ""),
        ("model.text_model.embed_tokens.weight", "model.embed_tokens.weight", ""),
        ("language_model.backbone.norm_f.weight", "model.norm.weight", ""),
        ("backbone.embeddings.weight", "model.embed_tokens.weight", ""),
        ("lm_head.weight", "lm_head.weight", ""),
        ("model.layers.0.x", "model.layers.0.x", ""),
        ("model.visual.blocks.0.x", "model.visual.blocks.0.x", "model.visual"),
        ("vision_tower.x", "vision_tower.x", "vision_tower"),
        ("mtp.fc.weight", "mtp.fc.weight", "mtp"),
        ("image_newline", "image_newline", "image_newline"),
    ],
)
def test_names_are_those_of_the_text_model(stored: str, own: str, part: str) -> None:
    assert (text_name(stored), other_part(stored)) == (own, part)


def test_tokens_that_end_a_sequence_stand_in_the_text_part(tmp_path: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((DEMO_MODEL_DIR / file).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"model_type": "llama", "eos_token_id": [7, 9]}}))
    assert read_tokenizer(tmp_path).eos_ids == {7, 9}


def test_settings_of_the_text_model_may_stand_among_those_of_other_parts(tmp_path: Path) -> None:
    """As the releases of Qwen2.5-VL have them, with a rope of the kind mrope."""
    folder = build_whole(tmp_path, "qwen2_5_vl", TEXT | WHOLE["qwen2_5_vl"])
    expected = logits(folder)
    raw = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in raw["text_config"].items() if key not in ("model_type", "rope_parameters")}
    flat = {"model_type": "qwen2_5_vl", "rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (folder / "config.json").write_text(json.dumps(text | flat | {"vision_config": {}, "tie_word_embeddings": False}))
    assert all(torch.equal(a, b) for a, b in zip(expected, logits(folder), strict=True))
    assert read_model_config(folder).wrapper == "qwen2_5_vl"


def test_a_text_part_that_is_not_served_alone_is_refused_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}))
    with pytest.raises(UnsupportedModelError, match="tokens of its prompts read later ones, too"):
        served(tmp_path)


def test_a_text_part_without_a_type_is_refused_by_the_missing_field(tmp_path: Path) -> None:
    for raw in ({"model_type": "llava", "text_config": {"hidden_size": 64}}, {"text_config": {"model_type": 7}}):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        for refuse in (served, lambda folder: check_model(folder, EngineConfig(model=str(folder)))):
            with pytest.raises(ModelConfigError, match=r"config\.json: text_config\.model_type must name the family"):
                refuse(tmp_path)


@pytest.mark.parametrize("model_type", [None, 7, ["llama"], {}])
def test_a_type_that_is_no_name_is_of_a_larger_model(model_type: object) -> None:
    assert unwrap({"model_type": model_type, "text_config": {"model_type": "llama"}})["wrapped_in"] == "a larger model"
    assert "wrapped_in" not in unwrap({"model_type": model_type, "text_config": {"model_type": model_type}})
