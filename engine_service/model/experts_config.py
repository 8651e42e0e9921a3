"""ExpertsConfig: which layers have experts, and how tokens choose among them, as config.json says it for a family."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .checkpoint.errors import UnsupportedModelError
from .checkpoint.json_file import bad, count, flag, number
from .families.family import ExpertNames, Family, RoutingRule
from .layer_kinds import LayerPart


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen, and by what their outputs are weighed.

    Attributes:
        num_chosen: experts of each token.
        scoring: softmax over all experts, or the sigmoid of each one's logit.
        is_renormalised: the weights of a token's experts add up to 1, before `scale`.
        scale: factor of the weights.
        num_groups, num_chosen_groups: experts are chosen from the best of so many equal groups (DeepSeek-V2, arXiv 2405.04434).
        group_score: a group is as good as its best expert, or as the sum of its best two (DeepSeek-V3, arXiv 2412.19437).
        weighs_inputs: an expert's input is weighed instead of its output.
        least: added to the sum that renormalised weights are divided by.
        is_wide: logits are computed in float32, whatever the weights' dtype.
    """

    num_chosen: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_renormalised: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    is_wide: bool = False
    weighs_inputs: bool = False
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Experts, in the MLPs of `layers`.

    Attributes:
        shared_size: width of the MLP that all tokens go through; 0: there is none.
        are_apart: the checkpoint has them one by one, though the family's have them together.
        are_beside: they are beside those MLPs.
        latent_size: width of what tokens are projected to for their experts; 0: they take tokens as they are.
    """

    layers: frozenset[int]
    num_experts: int
    intermediate_size: int
    shared_size: int
    routing: Routing
    are_apart: bool = False
    are_beside: bool = False
    latent_size: int = 0


def parse_experts(
    raw: Mapping[str, Any], family: Family, num_layers: int, parts: Sequence[LayerPart] = ()
) -> ExpertsConfig | None:
    """None for a model without. parts: see ModelConfig. Raises ModelConfigError, UnsupportedModelError."""
    if family.experts is None or (parts and "experts" not in parts):
        return None
    names = family.experts
    if names.switch_key and not flag(raw, names.switch_key):
        return None
    key = next((each for each in ("num_experts", "n_routed_experts") if raw.get(each) is not None), "num_local_experts")
    num_experts, num_chosen = count(raw, key), count(raw, names.chosen_key)
    if num_chosen > num_experts:
        raise bad(names.chosen_key, f"{num_chosen} is more than {key} {num_experts}")
    layers = frozenset(layer for layer, part in enumerate(parts) if part == "experts")
    layers = layers or _expert_layers(raw, family.experts.routing, num_layers)
    width, shared_size = count(raw, family.experts.intermediate_key), 0
    if family.experts.shared_key:
        shared_size = count(raw, family.experts.shared_key)
    elif family.experts.shared:
        shared_size = count(raw, "n_shared_experts", family.experts.default_shared) * width
    return ExpertsConfig(
        layers=layers,
        num_experts=num_experts,
        intermediate_size=width,
        shared_size=shared_size,
        routing=_parse_routing(raw, family.experts, num_experts, num_chosen),
        are_beside=names.is_beside,
        latent_size=count(raw, names.latent_key) if raw.get(names.latent_key) is not None else 0,
    )


def _expert_layers(raw: Mapping[str, Any], rule: RoutingRule, num_layers: int) -> frozenset[int]:
    """All but the first ones and mlp_only_layers, and every decoder_sparse_step-th of them only; or as mlp_layer_types says."""
    if rule.has_layer_types and (kinds := raw.get("mlp_layer_types")):
        if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in ("dense", "sparse") for kind in kinds):
            raise bad("mlp_layer_types", f"must be a list of {num_layers}, each dense or sparse")
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    if rule.has_moe_layers:
        every = count(raw, "interleave_moe_layer_step", 1)
        layers = raw.get("moe_layers")
        layers = list(range(every - 1, num_layers, every)) if layers is None else layers
        if not isinstance(layers, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in layers):
            raise bad("moe_layers", f"must be a list of layers below {num_layers}, is {layers!r}")
        return frozenset(layers)
    dense, step = raw.get("mlp_only_layers") or [], count(raw, "decoder_sparse_step", 1)
    if not isinstance(dense, list):
        raise bad("mlp_only_layers", f"must be a list, is {dense!r}")
    if (every := raw.get("moe_layer_freq", 1)) not in (1, None):
        raise UnsupportedModelError("moe_layer_freq", every, "1")
    first = raw.get("first_k_dense_replace")
    first = rule.first_dense if first is None else first
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise bad("first_k_dense_replace", f"must be 0 or a positive integer, is {first!r}")
    return frozenset(layer for layer in range(first, num_layers) if layer not in dense and (layer + 1) % step == 0)


def _parse_routing(raw: Mapping[str, Any], family: ExpertNames, num_experts: int, num_chosen: int) -> Routing:
    rule = family.routing
    if rule.has_correction and raw.get("use_expert_bias") is False:
        raise UnsupportedModelError("use_expert_bias", False, "true")
    if (said := raw.get("scoring_func", rule.scoring)) != rule.scoring:
        raise UnsupportedModelError("scoring_func", said, rule.scoring)
    by_groups = rule.groups is not None
    if rule.methods:
        method = rule.methods[0] if raw.get("topk_method") is None else raw["topk_method"]
        if method not in rule.methods:
            raise UnsupportedModelError("topk_method", method, ", ".join(rule.methods))
        by_groups = method == rule.methods[-1]
    num_groups = num_chosen_groups = 1
    if by_groups and rule.groups is not None:
        num_groups, num_chosen_groups = count(raw, "n_group", rule.groups[0]), count(raw, "topk_group", rule.groups[1])
    least = 2 if rule.group_score == "best_two" else 1
    if num_experts % num_groups or num_experts // num_groups < least:
        raise bad("n_group", f"must divide {num_experts} experts into groups of {least} or more, is {num_groups}")
    if not num_chosen <= num_chosen_groups * (num_experts // num_groups) <= num_experts:
        raise bad("topk_group", f"must be {num_groups} groups or fewer, with {num_chosen} experts, is {num_chosen_groups}")
    renormalises = family.always_renormalises
    if not renormalises and rule.renormalises is not None:
        renormalises = rule.renormalises if raw.get("norm_topk_prob") is None else flag(raw, "norm_topk_prob")
    return Routing(
        num_chosen,
        scoring=rule.scoring,
        is_renormalised=renormalises,
        scale=1.0 if rule.scale is None else number(raw, "routed_scaling_factor", rule.scale),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        group_score=rule.group_score,
        is_wide=rule.is_wide,
        weighs_inputs=rule.weighs_inputs,
        least=rule.least,
    )
