"""Every tensor of a checkpoint is used, left out by its name with a reason, or refused; and the head is the file's own."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from kvkeeper.engine_service.compute.self_check import load_checked_model
from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.errors import WeightsError
from kvkeeper.engine_service.model.checkpoint.text_part import text_name
from kvkeeper.engine_service.model.config import read_model_config
from kvkeeper.engine_service.model.families.table import FAMILIES
from kvkeeper.engine_service.model.left_out import list_left_out
from kvkeeper.engine_service.model.loader import load_model
from tests.support.models.quantised_models import FORMATS, Tensors, build_both
from tests.support.models.tiny_models import (
    TINY_MODELS,
    NumericsCase,
    TinyModel,
    build_model_folder,
    random_tokens,
    reference_logits,
    tiny_model,
)
from tests.support.worlds.hand_tables import HandTables
from tests.support.worlds.rank_threads import on_ranks

torch.set_num_threads(1)

CASES = (NumericsCase(random_tokens(24)),)
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def of_each_family() -> list[TinyModel]:
    """The first of each, with tied embeddings."""
    first: dict[str, TinyModel] = {}
    for model in TINY_MODELS:
        first.setdefault(model.family, model)
    return [dataclasses.replace(model, overrides=model.overrides | {"tie_word_embeddings": True}) for model in first.values()]


def change(folder: Path, how: Callable[[Tensors], None], file: str = WEIGHTS) -> None:
    tensors = load_file(folder / file)
    how(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)


def another_head(tensors: Tensors) -> None:
    drawn = torch.Generator().manual_seed(7)
    embeddings = next(tensor for name, tensor in tensors.items() if text_name(name) == EMBEDDINGS)
    tensors[HEAD] = embeddings + 0.1 * torch.randn(embeddings.shape, generator=drawn)


def set_config(folder: Path, **changes: object) -> None:
    """A change to None takes the field away."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def logits(folder: Path) -> list[torch.Tensor]:
    return HandTables(load_model(folder, progress=False)[0], 16).compute(CASES, 64)


def test_there_is_a_model_of_each_family() -> None:
    assert len(of_each_family()) == len(FAMILIES)


@pytest.mark.parametrize("model", of_each_family(), ids=lambda model: model.name)
def test_a_head_of_the_files_own_is_used_where_the_config_ties_it(model: TinyModel, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, model)
    tied = logits(folder)
    change(folder, another_head)
    if FAMILIES[read_model_config(folder).family].is_tied:
        set_config(folder, tie_word_embeddings=None)  # the family's default
    reference = reference_logits(folder, CASES)
    with capture_logs() as told:
        found = logits(folder)
    assert reference.error(found) <= reference.bound
    assert reference.error(tied) > 0.1
    assert [line["log_level"] for line in told if line["event"] == "head_not_tied"] == ["warning"]


def test_a_head_that_equals_the_embeddings_is_tied_to_them(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, tiny_model("llama_tied"))
    expected, before = logits(folder), load_served_model(EngineConfig(model=str(folder), progress=False)).num_parameters
    change(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDINGS].clone()}))
    with capture_logs() as told:
        assert torch.equal(logits(folder)[0], expected[0])
    assert told == []
    assert load_model(folder, progress=False)[1].tied_embeddings
    assert load_served_model(EngineConfig(model=str(folder), progress=False)).num_parameters == before
    change(folder, another_head)
    assert load_served_model(EngineConfig(model=str(folder), progress=False)).num_parameters == before + 512 * 64


def test_what_head_and_embeddings_are_may_be_stored_as_the_head_alone(tmp_path: Path) -> None:
    """As a library does that stores a tensor once, under the first of its names."""
    folder = build_model_folder(tmp_path, tiny_model("llama_tied"))
    expected, served = logits(folder), load_served_model(EngineConfig(model=str(folder), progress=False))
    change(folder, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDINGS)}))
    assert torch.equal(logits(folder)[0], expected[0])
    assert torch.equal(split_logits(folder)[0].argmax(1), expected[0].argmax(1))
    assert load_served_model(EngineConfig(model=str(folder), progress=False)).num_parameters == served.num_parameters


def split_logits(folder: Path) -> list[torch.Tensor]:
    """Of the first of two ranks."""
    return on_ranks(2, lambda split: HandTables(load_model(folder, progress=False, split=split)[0], 4).compute(CASES, 7))[0]


def test_the_first_of_several_ranks_has_the_files_head(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, tiny_model("llama_tied"))
    change(folder, another_head)
    reference = reference_logits(folder, CASES)
    assert reference.error(split_logits(folder)) <= reference.bound


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "quantised"])
@pytest.mark.parametrize("stored", [each for each in FORMATS if each.name in ("gptq", "awq", "packed_4", "fp8_by_block")])
def test_a_quantised_checkpoint_has_its_own_head_too(stored, is_packed: bool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    packed, plain = build_both(tmp_path, tiny_model("llama_tied"), stored)
    change(plain, another_head)
    head = load_file(plain / WEIGHTS)[HEAD]
    parts = {HEAD: head}
    if is_packed:
        packed_parts, meant = stored.pack(head.numpy().astype("float64"))
        parts = {f"lm_head.{part}": value for part, value in packed_parts.items()}
        change(plain, lambda tensors: tensors.update({HEAD: torch.from_numpy(meant).float()}))
    save_file({name: value.contiguous() for name, value in parts.items()}, packed / "model-2.safetensors")
    places = json.loads((packed / INDEX).read_text())["weight_map"]
    (packed / INDEX).write_text(json.dumps({"weight_map": places | dict.fromkeys(parts, "model-2.safetensors")}))
    found, expected = logits(packed)[0], logits(plain)[0]
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    counts = [load_served_model(EngineConfig(model=str(each), progress=False)).num_parameters for each in (packed, plain)]
    assert counts[0] == counts[1]


def test_models_that_the_library_runs_have_the_files_head(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, TinyModel("starcoder2", "Starcoder2", {"tie_word_embeddings": True}))
    change(folder, another_head)
    reference = reference_logits(folder, CASES)
    model = load_checked_model(folder, "starcoder2", "float32", device=torch.device("cpu"), progress=False)
    assert reference.error(HandTables(model, 4).compute(CASES, 7)) <= reference.bound


def test_what_the_library_would_leave_out_is_refused(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, TinyModel("starcoder2", "Starcoder2"))
    for name, said in (("q_norm", r"q_norm\.weight;"), ("k_norm", r"k_norm\.weight and 1 more;")):
        change(folder, lambda tensors, name=name: tensors.update({f"model.layers.0.self_attn.{name}.weight": torch.ones(16)}))
        with pytest.raises(WeightsError, match=rf"tensors are not part of .* describes: model\.layers\.0\.self_attn\.{said}"):
            load_served_model(EngineConfig(model=str(folder), progress=False))


@pytest.mark.parametrize("model", TINY_MODELS, ids=lambda model: model.name)
def test_nothing_that_a_model_is_made_of_is_unneeded(model: TinyModel, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, model)
    assert list_left_out(load_file(folder / WEIGHTS), read_model_config(folder)) == {}


def further_layer(tensors: Tensors) -> None:
    """A copy of layer 1 behind the last one, and what joins it to a token's embedding."""
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
    tensors |= {name.replace(".1.", ".2.", 1): tensor.clone() for name, tensor in layer.items()}
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)


def freqs(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


LEFT_OUT = [
    ("deepseek_v3", further_layer, "predicts further tokens"),
    ("glm4_moe_lite", further_layer, "predicts further tokens"),
    ("qwen3_next", lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(2)}), "predicts further tokens"),
    ("llama", freqs, "follows from config.json"),
]


@pytest.mark.parametrize(("name", "how", "reason"), LEFT_OUT, ids=[name for name, *_ in LEFT_OUT])
def test_what_is_left_out_is_told_with_its_reason(
    name: str, how: Callable[[Tensors], None], reason: str, tmp_path: Path
) -> None:
    folder = build_model_folder(tmp_path, tiny_model(name))
    expected, before = logits(folder), load_served_model(EngineConfig(model=str(folder), progress=False)).num_parameters
    num_before = len(load_file(folder / WEIGHTS))
    change(folder, how)
    with capture_logs() as told:
        assert torch.equal(logits(folder)[0], expected[0])
    (line,) = (line for line in told if line["event"] == "tensors_left_out")
    assert (line["reason"], line["num_tensors"]) == (reason, len(load_file(folder / WEIGHTS)) - num_before)
    assert load_served_model(EngineConfig(model=str(folder), progress=False)).num_parameters == before


def without_its_join(tensors: Tensors) -> None:
    further_layer(tensors)
    del tensors["model.layers.2.eh_proj.weight"]


NO_PLACE = [
    ("deepseek_v3", without_its_join, r"model\.layers\.2\."),  # a layer of the model that config.json does not count
    ("llama", further_layer, r"model\.layers\.2\."),
    ("llama", lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(2)}), r"mtp\.fc"),
    ("llama", lambda tensors: tensors.update({"vision.rotary_emb.inv_freq": torch.ones(2)}), r"vision\.rotary_emb"),
    ("llama", lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}), "k_scale"),
    ("llama", lambda tensors: tensors.update({"lm_head.bias": torch.ones(512)}), r"lm_head\.bias"),
    ("llama_tied", lambda tensors: tensors.update({"lm_head.bias": torch.ones(512)}), r"lm_head\.(bias|weight)"),
]


@pytest.mark.parametrize(("name", "how", "named"), NO_PLACE, ids=range(len(NO_PLACE)))
def test_all_else_is_refused_by_its_name(name: str, how: Callable[[Tensors], None], named: str, tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path, tiny_model(name))
    change(folder, how)
    with pytest.raises(WeightsError, match=named):
        load_model(folder, progress=False)


def test_a_tensor_without_a_place_and_one_that_is_there_twice_are_told_apart(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "model", tiny_model("llama"))
    tensors = load_file(folder / WEIGHTS)
    shutil.move(folder / WEIGHTS, folder / "a.safetensors")
    for name, said in (
        ("model.norm.weight", r"^b\.safetensors: tensor model\.norm\.weight is stored twice, in a\.safetensors before$"),
        ("odd", r"^b\.safetensors: tensor odd is not part of the model that config\.json describes \(llama, 2 layers\)$"),
    ):
        save_file({name: tensors["model.norm.weight"].clone()}, folder / "b.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", name: "b.safetensors"}}))
        with pytest.raises(WeightsError, match=said):
            load_model(folder, progress=False)


def test_plain_weights_under_a_quantised_config_are_told_as_what_they_are(tmp_path: Path) -> None:
    stored = next(each for each in FORMATS if each.name == "awq")
    packed, plain = build_both(tmp_path, tiny_model("llama"), stored)
    with capture_logs() as told:
        logits(packed)
    assert [line["event"] for line in told] == ["weights_dequantised"]
    expected = logits(plain)
    set_config(plain, quantization_config=stored.said)
    with capture_logs() as told:
        assert torch.equal(logits(plain)[0], expected[0])
    (line,) = told
    assert (line["event"], line["log_level"]) == ("weights_not_quantised", "warning")
    assert "AWQ, 4 bit" in line["message"]
