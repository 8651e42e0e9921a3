"""A field of a family is one feature: rows that the table does not have compute what the library computes, or are no family.

Beside the table's own rows, which test_numerics.py holds to the library: families that only the library has, as rows; and rows
with one feature more than their model, to which the library is helped.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.checkpoint.errors import UnsupportedModelError
from kvkeeper.engine_service.model.families import table
from kvkeeper.engine_service.model.families.family import DeltaFamily, ExpertNames, Family, LatentFamily, RoutingRule
from kvkeeper.engine_service.model.loader import load_model
from tests.support.models.tiny_models import (
    NumericsCase,
    TinyModel,
    build_model_folder,
    quiet_transformers,
    random_tokens,
    tiny_model,
)
from tests.support.reference.within_cache import load_network, within_cache_logits
from tests.support.worlds.batches import ScheduledRow, WantLogits, build_batch
from tests.support.worlds.hand_tables import HandTables
from tests.unit.engine_service.model.test_retention_numerics import Tables

torch.set_num_threads(1)

TEXT = random_tokens(40)
ROWS = table.FAMILIES
_EACH = ("gate_proj", "up_proj", "down_proj")
_V3 = RoutingRule(
    scoring="sigmoid", group_score="best_two", has_correction=True, is_wide=True, renormalises=True, scale=1.0, groups=(1, 1)
)
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.7}
_GROWTH = {"floor_scale": 6, "attn_scale": 0.7}  # of a feature that the model does not have
Help = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A family beside the table's, a model of it, and how the library is helped to its features."""

    family: Family
    model: TinyModel
    help: Help = lambda network: None  # may give a function of the logits
    left_out: tuple[str, ...] = ()  # fields of config.json, so that the row's default counts


def model(family: str, **overrides: Any) -> TinyModel:
    return TinyModel(family.lower(), family, {"pad_token_id": 0} | overrides)


def scaled(*names: str, by: float) -> Help:
    """Parameters whose names end so."""

    def multiply(network: Any) -> None:
        for name, parameter in network.named_parameters():
            if name.endswith(names):
                parameter.mul_(by)

    return multiply


def one_more(network: Any) -> None:
    for name, parameter in network.named_parameters():
        if "norm" in name:
            parameter.add_(1)


def score_scale(network: Any) -> None:
    for layer in network.model.layers:
        layer.self_attn.scaling = 24**-0.5


def unrotated(network: Any) -> None:
    """The last of four layers."""

    def still(module: Any, args: Any, options: dict[str, Any]) -> Any:
        cos, sin = options["position_embeddings"]
        return args, options | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

    network.model.layers[3].self_attn.register_forward_pre_hook(still, with_kwargs=True)


def depth_scales(network: Any) -> None:
    scaled("embed_tokens.weight", by=12)(network)
    scaled("o_proj.weight", "down_proj.weight", by=1.4 / 2**0.5)(network)
    scaled("lm_head.weight", by=256 / 64)(network)


LLAMA, QWEN3 = ROWS["llama"], ROWS["qwen3"]
CASES = {
    "unrotated layers": Row(
        Family(mlp_bias=None, has_unrotated_layers=True, is_tied=True), model("SmolLM3", num_hidden_layers=4, **_GROWTH)
    ),
    "unrotated layers, none rotated": Row(
        Family(has_unrotated_layers=True), model("SmolLM3", no_rope_layers=[0, 0], **_GROWTH)
    ),
    "unrotated layers and norms of heads": Row(
        dataclasses.replace(QWEN3, has_unrotated_layers=True), model("Qwen3", num_hidden_layers=4), unrotated
    ),
    "unrotated layers, and none in chunks": Row(
        dataclasses.replace(ROWS["llama4_text"], default_chunk=16),
        tiny_model("llama4"),
        left_out=("attention_chunk_size", "layer_types"),
    ),
    "pairs side by side": Row(Family(mlp_bias=None, o_bias=False, pairs_sides=True), model("Helium", head_dim=16)),
    "a shared expert": Row(
        Family(
            qkv_bias=True,
            o_bias=False,
            windows="switched",
            experts=ExpertNames(
                "mlp",
                _EACH,
                always_renormalises=False,
                intermediate_key="moe_intermediate_size",
                shared="shared_expert",
                shared_key="shared_expert_intermediate_size",
                shared_gate="shared_expert_gate",
            ),
        ),
        model(
            "Qwen2Moe", num_experts=4, shared_expert_intermediate_size=40, **_EXPERTS
        ),  # its factor and groups are not heeded
    ),
    "experts by groups, with heads of K and V": Row(
        Family(
            qk_norm="head",
            experts=ExpertNames(
                "mlp",
                _EACH,
                always_renormalises=False,
                intermediate_key="moe_intermediate_size",
                shared="shared_experts",
                routing=_V3,
            ),
        ),
        model("Dots1", n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, num_hidden_layers=3, **_EXPERTS),
    ),
    "heads that are rotated in part": Row(
        Family(
            qk_norm="head",
            has_partial_rope=True,
            default_part=0.5,
            o_bias=False,
            experts=ExpertNames(
                "mlp",
                _EACH,
                always_renormalises=False,
                intermediate_key="moe_intermediate_size",
                shared="shared_experts",
                routing=_V3,
            ),
        ),
        model(
            "Glm4Moe",
            n_routed_experts=8,
            n_shared_experts=1,
            first_k_dense_replace=1,
            use_qk_norm=True,
            attention_bias=True,
            **_EXPERTS,
        ),
    ),
    "scaled embeddings": Row(
        dataclasses.replace(LLAMA, scales_embeddings=True), tiny_model("llama"), scaled("embed_tokens.weight", by=8)
    ),
    "1 + weight": Row(dataclasses.replace(LLAMA, has_norm_offset=True), tiny_model("llama"), one_more),
    "1 + weight, of heads": Row(dataclasses.replace(QWEN3, has_norm_offset=True), tiny_model("qwen3"), one_more),
    "gelu": Row(dataclasses.replace(LLAMA, activation="gelu_tanh"), model("Llama", hidden_act="gelu_pytorch_tanh")),
    "a factor of scores": Row(dataclasses.replace(LLAMA, query_scalar=24), tiny_model("llama"), score_scale),
    "a bound of logits": Row(
        dataclasses.replace(LLAMA, soft_caps=(None, 5.0)),
        tiny_model("llama"),
        lambda network: lambda logits: torch.tanh(logits / 5) * 5,
    ),
    "factors by depth": Row(dataclasses.replace(LLAMA, has_depth_scales=True), tiny_model("llama"), depth_scales),
    "biases of MLPs": Row(dataclasses.replace(LLAMA, mlp_bias=True), model("Llama", mlp_bias=True), left_out=("mlp_bias",)),
    "biases by default": Row(
        dataclasses.replace(LLAMA, biased=True), model("Llama", attention_bias=True), left_out=("attention_bias",)
    ),
}


def folder_of(row: Row, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the row's model, which is a native family from now on."""
    build_model_folder(folder, row.model)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    monkeypatch.setitem(ROWS, raw["model_type"], row.family)  # type: ignore[misc]
    return folder


@torch.no_grad()
def of_library(row: Row, folder: Path) -> torch.Tensor:
    with quiet_transformers():
        network = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
    bend = row.help(network) or (lambda logits: logits)
    found: torch.Tensor = bend(network(torch.tensor([TEXT]), use_cache=False).logits[0])
    return found


def leave_out(folder: Path, fields: tuple[str, ...]) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in raw.items() if key not in fields}))


def ours(folder: Path) -> torch.Tensor:
    loaded, _ = load_model(folder, progress=False)
    return HandTables(loaded, 4).compute([NumericsCase(TEXT)], 7)[0]


@pytest.mark.parametrize("row", CASES.values(), ids=CASES)
def test_a_row_computes_what_the_library_computes(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(row, tmp_path, monkeypatch)
    expected = of_library(row, folder)
    leave_out(folder, row.left_out)
    found = ours(folder)
    assert float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def varied(plain: Any, values: Iterable[Any]) -> set[str]:
    """Fields of a dataclass in which one of the values is another than `plain`."""
    return {
        each.name
        for value in values
        for each in dataclasses.fields(plain)
        if getattr(value, each.name) != getattr(plain, each.name)
    }


def test_every_field_is_held_to_the_library() -> None:
    """Here, or as a row of the table by test_numerics.py. Fields of latents and recurrent layers have no default."""
    rows = [*ROWS.values(), *(row.family for row in CASES.values())]
    experts = [row.experts for row in rows if row.experts is not None]
    names = ExpertNames("", ("", "", ""), always_renormalises=False, intermediate_key="")
    for plain, values in ((Family(), rows), (names, experts), (RoutingRule(), [each.routing for each in experts])):
        assert varied(plain, values) == {each.name for each in dataclasses.fields(plain)}


LATENT, DELTA = LatentFamily(8, 8, 8, 8, 8, "sides"), DeltaFamily(1, 1, 8, 8, 4, 4)
APART: dict[str, dict[str, Any]] = {
    "layers of one part and other kinds of layers": {"has_single_parts": True, "norms": "both"},
    "no rope and layers or heads that have one in part": {"has_rope": False, "has_partial_rope": True},
    "latents and other terms of scores": {"latent": LATENT, "has_sink_logits": True},
    "latents and other kinds of heads": {"latent": LATENT, "qk_norm": "head"},
    "latents and other kinds of layers": {"latent": LATENT, "windows": "all"},
    "recurrent layers and windows, chunks or sinks": {"recurrent": DELTA, "has_chunks": True},
    "windows and chunks": {"windows": "in_turn", "full_every": 2, "has_chunks": True},
    "growth of queries and rotated layers alone": {"has_query_growth": True},
    "growth of queries and a norm that undoes it": {"has_query_growth": True, "has_unrotated_layers": True, "qk_norm": "head"},
    "a norm over all heads and an order of their dimensions": {"qk_norm": "whole", "pairs_sides": True},
    "a norm without a weight and 1 \\+ weight": {"qk_norm": "unit", "has_norm_offset": True},
    "pairs side by side and heads that are rotated in part": {"pairs_sides": True, "has_partial_rope": True},
    "a rope of windows and heads that are rotated in part": {"local_theta": 1e4, "has_partial_rope": True},
    "an output gate and one tensor for": {"has_output_gate": True, "is_fused": True},
    "two factors of scores": {"query_scalar": 8, "score_scale": 1.0},
    "heads of several shapes and other kinds of heads": {"full_head_dim": 16, "has_output_gate": True},
    "shared K and V and other kinds of layers": {"shares_kv": True, "has_chunks": True},
    "inputs or scales of layers and norms": {"has_layer_scales": True, "norms": "after"},
    "two factors of embeddings": {"scales_embeddings": True, "has_depth_scales": True},
}


@pytest.mark.parametrize(("what", "fields"), APART.items(), ids=APART)
def test_features_that_are_not_computed_together_are_no_family(what: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"cannot have {what}"):
        Family(**fields)


def test_sinks_of_layers_that_are_not_rotated_are_not_rotated_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(CASES["unrotated layers"], tmp_path, monkeypatch)
    network, kept = load_network(folder), [(4, 8), (5, 11)]
    expected = [within_cache_logits(network, TEXT, sink, window) for sink, window in kept]
    loaded, _ = load_model(folder, progress=False)
    for chunk in (1, 6):
        found = Tables(loaded, 4).compute([TEXT, TEXT], kept, [chunk, chunk])
        assert max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected, strict=True)) < 1e-4


def test_sinks_are_refused_to_queries_that_grow_with_their_position(tmp_path: Path) -> None:
    """Which positions would count, of the text or within the cache, no model says."""
    kind = tiny_model("llama4")
    whole = {"attention_chunk_size": None, "layer_types": ["full_attention"] * 4}
    folder = build_model_folder(tmp_path, TinyModel("whole", kind.family, kind.overrides | whole))
    served = load_served_model(EngineConfig(model=str(folder), progress=False))
    assert served.refuses_retention == "a model whose queries grow with their position"
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"attn_temperature_tuning": False}))
    assert load_served_model(EngineConfig(model=str(folder), progress=False)).refuses_retention == ""


GELUS = [
    ("gemma", {"hidden_act": "gelu"}, True),  # means the approximation
    ("gemma", {"hidden_activation": "gelu"}, True),  # is not read
    ("gemma2", {"hidden_act": "gelu"}, True),
    ("gemma2", {"hidden_activation": "gelu"}, False),
    ("gemma3", {"hidden_act": "gelu"}, True),
    ("gemma3", {"hidden_activation": "gelu"}, False),
    ("llama", {"hidden_activation": "gelu"}, True),
    ("llama", {"hidden_act": "gelu"}, False),
]


@pytest.mark.parametrize(("name", "said", "is_ours"), GELUS, ids=[f"{name}-{next(iter(said))}" for name, said, _ in GELUS])
def test_the_activation_is_the_one_that_the_library_reads(
    name: str, said: dict[str, Any], is_ours: bool, tmp_path: Path
) -> None:
    folder = build_model_folder(tmp_path, tiny_model(name))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | said))
    expected = of_library(Row(Family(), tiny_model(name)), folder)
    if is_ours:
        assert float((ours(folder) - expected).abs().max()) <= 1e-5
        return
    with pytest.raises(UnsupportedModelError, match=f"{next(iter(said))} 'gelu'"):
        load_model(folder, progress=False)
    served = load_served_model(EngineConfig(model=str(folder), progress=False))
    layout = served.layout(4)
    memory = torch.zeros(12 * layout.block_bytes, dtype=torch.uint8)
    runner = served.make_runner(layout.view(memory), layout)
    row = ScheduledRow(TEXT, 0, np.arange(1, 11, dtype=np.int32), WantLogits.ALL)
    assert float((runner.forward(build_batch([row], 4)) - expected).abs().max()) <= 1e-5
