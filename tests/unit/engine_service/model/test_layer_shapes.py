"""Layers with K and V of their own shape, or that read those of others: what config.json says, and what a fault changes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvkeeper.engine_service.compute.stored_model import kv_groups
from kvkeeper.engine_service.model.checkpoint.errors import ModelConfigError, UnsupportedModelError, WeightsError
from kvkeeper.engine_service.model.config import parse_model_config
from kvkeeper.engine_service.model.loader import load_model
from kvkeeper.engine_service.model.split import Split, config_of_rank
from tests.support.models.tiny_models import (
    NumericsCase,
    ReferenceLogits,
    build_model_folder,
    random_tokens,
    reference_logits,
    tiny_model,
)
from tests.support.worlds.hand_tables import HandTables

torch.set_num_threads(1)

PLAIN: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 262_144,
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 42,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "num_kv_shared_layers": 18,
}
# The released forms: what differs from PLAIN, the groups, and elements of a token's keys in a block of each kind of layers.
FORMS: dict[str, tuple[dict[str, Any], list[tuple[int, int, int]]]] = {
    "E4B": ({}, [(2, 2, 512)] * 2 + [(4, 2, 256)] * 5),
    "12B": (
        {
            "model_type": "gemma4_unified_text",
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
        },
        [(8, 1, 512)] + [(2, 8, 256)] * 20,
    ),
    "31B": (
        {
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
        [(10, 4, 512)] + [(5, 16, 256)] * 10,
    ),
}


@pytest.mark.parametrize(("changes", "groups"), FORMS.values(), ids=FORMS)
def test_blocks_of_released_forms_waste_nothing(changes: dict[str, Any], groups: list[tuple[int, int, int]]) -> None:
    config = parse_model_config(PLAIN | changes)
    found = [(len(group.layers), group.num_kv_heads, group.head_dim) for group in kv_groups(config)]
    assert found == groups
    assert len({count * heads * size for count, heads, size in found}) == 1
    assert config.scale == 1.0


def test_what_layers_have_is_said_by_kind_or_one_by_one() -> None:
    by_kind = parse_model_config(PLAIN)
    each = {f"{layer:02}": {"head_dim": 512} for layer in range(5, 42, 6)}
    one_by_one = parse_model_config(PLAIN | {"per_layer_config": each, "global_head_dim": 128})
    assert one_by_one.layer_heads == by_kind.layer_heads
    assert [by_kind.kv_heads(layer) for layer in (4, 5)] == [(2, 256), (2, 512)]
    assert by_kind.kv_sources == tuple(23 if (layer + 1) % 6 == 0 else 22 for layer in range(24, 42))
    assert parse_model_config(PLAIN | {"per_layer_config": {}}).layer_heads == ()
    ends_sliding = {"layer_types": ["full_attention"] + ["sliding_attention"] * 41, "num_kv_shared_layers": 0}
    assert parse_model_config(PLAIN | ends_sliding).windows == (None, *[512] * 40, None)
    assert parse_model_config(PLAIN | {"use_bidirectional_attention": "vision"}).windows == by_kind.windows


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"per_layer_config": {"5": {"intermediate_size": 8}}}, UnsupportedModelError, "'intermediate_size'"),
    ({"per_layer_config": {"5": {"head_dim": 512}}}, UnsupportedModelError, "layers of one kind"),
    ({"per_layer_config": {"42": {"head_dim": 512}}}, ModelConfigError, "layers below 42, has '42'"),
    ({"per_layer_config": [1]}, ModelConfigError, "must be an object"),
    ({"global_head_dim": 511}, ModelConfigError, "be even, are 2 of 511"),
    ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, ModelConfigError, "must divide num_attention_heads 8"),
    ({"num_kv_shared_layers": 42}, ModelConfigError, "leaves no layer whose K and V layer 0 could read"),
    ({"num_kv_shared_layers": 37}, ModelConfigError, "leaves no layer whose K and V layer 5 could read"),
    ({"num_kv_shared_layers": -1}, ModelConfigError, "num_kv_shared_layers must be a positive integer"),
    ({"vocab_size_per_layer_input": 9}, ModelConfigError, "must be vocab_size 262144 or more, is 9"),
    ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "'all' .*causal attention"),
    ({"enable_moe_block": True, "num_experts": 8, "top_k_experts": 9}, ModelConfigError, "top_k_experts 9 is more than"),
]


@pytest.mark.parametrize(("changes", "kind", "why"), REFUSED, ids=[why for _, _, why in REFUSED])
def test_what_cannot_be_is_refused_by_its_name(changes: dict[str, Any], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        parse_model_config(PLAIN | changes)


def test_ranks_split_the_heads_of_each_kind_of_layers() -> None:
    config = parse_model_config(PLAIN | FORMS["31B"][0])
    assert set(config_of_rank(config, Split(1, 4)).layer_heads) == {(4, 256), (1, 512)}
    assert set(config_of_rank(config, Split(1, 8)).layer_heads) == {(2, 256), (1, 512)}
    three = dataclasses.replace(config, num_heads=36)
    with pytest.raises(UnsupportedModelError, match="divisors or multiples of the 4 KV heads"):
        config_of_rank(three, Split(0, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"), tiny_model("gemma4_e2b"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReferenceLogits:
    return reference_logits(folder, [CASE])


CASE = NumericsCase(random_tokens(40))
FAULTS: dict[str, dict[str, Any]] = {
    "a sharing layer reads its neighbour": {"kv_sources": (0, 1, 2)},
    "a window is one token too long": {"windows": (9, 9, None) * 2},
    "a window is one token too short": {"windows": (7, 7, None) * 2},
    "scores are scaled by the size of heads": {"score_scale": None},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("chunk_size", [1, 64])
def test_a_fault_exceeds_the_bound_a_hundred_times(
    folder: Path, reference: ReferenceLogits, chunk_size: int, fault: dict[str, Any]
) -> None:
    model, config = load_model(folder, progress=False)
    assert (config.kv_sources, config.windows) == ((1, 1, 2), (8, 8, None) * 2)
    assert reference.error(HandTables(model, 4).compute([CASE], chunk_size)) <= reference.bound
    model.config = dataclasses.replace(config, **fault)
    assert reference.error(HandTables(model, 4).compute([CASE], chunk_size)) > 100 * reference.bound


def test_k_and_v_of_a_layer_that_reads_those_of_another_are_left_out(folder: Path, tmp_path: Path) -> None:
    """Released files have them; the library ignores them, too."""
    tensors = load_file(folder / "model.safetensors")
    assert "model.layers.3.self_attn.k_proj.weight" not in tensors
    unused = {f"model.layers.3.self_attn.{name}.weight": torch.ones(3) for name in ("k_proj", "v_proj", "k_norm", "v_norm")}
    save_file(tensors | unused, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    expected, found = (load_model(each, progress=False)[0] for each in (folder, tmp_path))
    logits = [HandTables(model, 4).compute([CASE], 64)[0] for model in (expected, found)]
    assert torch.equal(*logits)
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_kv_shared_layers": 2}))
    with pytest.raises(WeightsError, match=r"layers\.3\."):  # now they are its own
        load_model(tmp_path, progress=False)
