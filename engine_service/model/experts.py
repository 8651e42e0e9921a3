"""Mixture of experts: each token goes through the few MLPs that a router chooses for it.

Rows are sorted by expert, so that each expert is one product over its tokens; an expert that no token chose costs nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.linear_int8 import Int8Weight
from kvkeeper.kernels.activations.linear_weight import LinearWeight

Weight = LinearWeight | Int8Weight


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP. H hidden, I intermediate. gate_up: [2 I, H], gate first; down: [H, I]."""

    gate_up: Weight
    down: Weight

    def packed(self, pack: Callable[[Weight], Weight]) -> "MlpWeights":
        return MlpWeights(pack(self.gate_up), pack(self.down))


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer.

    Attributes:
        router: [E, H]. It stays in the weights' own dtype: a choice is no number that could be a little off.
        num_chosen: experts of each token.
        is_renormalised: the weights of a token's experts add up to 1.
    """

    router: LinearWeight
    experts: tuple[MlpWeights, ...]
    num_chosen: int
    is_renormalised: bool

    def packed(self, pack: Callable[[Weight], Weight]) -> "ExpertWeights":
        experts = tuple(expert.packed(pack) for expert in self.experts)
        return ExpertWeights(self.router, experts, self.num_chosen, self.is_renormalised)


def apply_mlp(
    x: torch.Tensor, weights: MlpWeights | ExpertWeights, gate: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """[T, H] for x [T, H]."""
    if isinstance(weights, MlpWeights):
        return linear(gate(linear(x, weights.gate_up)), weights.down)
    shares, chosen = _route(x, weights)
    order = chosen.flatten().argsort(stable=True)  # by expert, and by token within
    counts = torch.bincount(chosen.flatten(), minlength=len(weights.experts)).tolist()
    sorted_rows = x.index_select(0, order // weights.num_chosen)
    found = torch.empty_like(sorted_rows)
    start = 0
    for expert, num_rows in zip(weights.experts, counts, strict=True):
        if num_rows:
            rows = slice(start, start + num_rows)
            found[order[rows]] = apply_mlp(sorted_rows[rows], expert, gate)
            start += num_rows
    return (found.unflatten(0, chosen.shape) * shares[..., None]).sum(1)


def _route(x: torch.Tensor, weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of each token's experts, and which they are: [T, num_chosen] each. The softmax is in float32."""
    shares, chosen = linear(x, weights.router).softmax(-1, dtype=torch.float32).topk(weights.num_chosen)
    if weights.is_renormalised:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares.to(x.dtype), chosen
