"""Mixture of experts: each token goes through the few MLPs that a router chooses for it.

Owns how a token's experts are chosen and how what they give is added up. Rows are sorted by expert, so that each expert is one
product over its tokens; an expert that no token chose costs nothing. On CUDA all experts are one launch over the sorted rows
(grouped_linear), and the host waits for nothing; so it is on a CPU where tokens are few. Of many, each expert's product is one
of linear's, which knows more ways to multiply.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from kvkeeper.kernels.activations.add import add
from kvkeeper.kernels.activations.gates import weigh_by_sigmoid
from kvkeeper.kernels.activations.grouped_linear import grouped_linear
from kvkeeper.kernels.activations.linear import is_for_tiles, linear, pack_linear
from kvkeeper.kernels.activations.linear_float8 import Float8Weight
from kvkeeper.kernels.activations.linear_integers import IntegerWeight
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.cpu.experts import ExpertTable, IntegerTable, choose, make_table, mix, multiply_experts
from kvkeeper.kernels.types import LinearWeight

from .checkpoint.destination import Destination, take_all
from .experts_config import Routing

Weight = LinearWeight | IntegerWeight | Float8Weight
_FEW_ROWS: Final = 256  # with more, a processor's units for tiles gain more than Python costs for each expert


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """An MLP. H hidden, I intermediate. gate_up: [2 I, H], gate first, or without a gate [I, H]; down: [H, I]."""

    gate_up: Weight
    down: Weight

    def packed(self, pack: Callable[[Weight], Weight]) -> "MlpWeights":
        return MlpWeights(pack(self.gate_up), pack(self.down))


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The experts as grouped_linear takes them: MLPs [E, ...] each, with biases [E, ...] or None."""

    gate_up: LinearWeight | IntegerWeight
    down: LinearWeight | IntegerWeight

    def packed(self, pack: Callable[[Weight], Weight]) -> "StackedExperts":
        gate_up, down = pack(self.gate_up), pack(self.down)
        assert not (isinstance(gate_up, Float8Weight) or isinstance(down, Float8Weight)), "no rows are multiplied so in groups"
        return StackedExperts(gate_up, down)

    def list_experts(self) -> tuple[MlpWeights, ...]:
        """Each by itself, a view of all of them."""
        return tuple(map(MlpWeights, _list_matrices(self.gate_up), _list_matrices(self.down)))


def _list_matrices(weight: Weight) -> list[LinearWeight]:
    assert isinstance(weight, LinearWeight), "they are packed as they are, all together or each by itself"
    biases = [None] * len(weight.data) if weight.bias is None else weight.bias
    return [LinearWeight(data, bias) for data, bias in zip(weight.data, biases, strict=True)]


@dataclass(frozen=True, slots=True)
class BesideWeights:
    """What experts beside an MLP need: both are added up behind norms of their own, and all take what attention gave [T, H].

    mlp_norm, experts_norm: [H], of what they give; input_norm: [H], of what the experts take; router_norm: [H], of what the
    router takes.
    """

    mlp: MlpWeights
    mlp_norm: torch.Tensor
    experts_norm: torch.Tensor
    input_norm: torch.Tensor
    router_norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer.

    Attributes:
        router: [E, H]. It stays in the weights' own dtype: a choice is no number that could be a little off.
        stacked: on CUDA, and until they are packed.
        experts: elsewhere, where each is packed by itself.
        correction: float32 [E], added to scores where experts are chosen, not where they are weighed; None: none.
        shared: the MLP that all tokens go through beside their experts; None: none.
        shared_gate: [1, H], the sigmoid of whose product with a token weighs that; None: it counts as it is. It stays as the
            router does. Packed it has a second row: oneDNN's layout of a single output is none that compiled kernels multiply.
        scales: [E], factors of what each expert gives; None: there are none.
        beside: the MLP that they are beside; None: they are in its place.
        enter, leave: [L, H] and [H, L], where experts take and give L numbers of a token, not H; None: they do not.
        tables: where gate_up and down of the packed experts are; None: compiled kernels do not multiply them together.
    """

    router: LinearWeight
    routing: Routing
    stacked: StackedExperts | None = None
    experts: tuple[MlpWeights, ...] = ()
    correction: torch.Tensor | None = None
    shared: MlpWeights | None = None
    shared_gate: LinearWeight | None = None
    scales: torch.Tensor | None = None
    beside: BesideWeights | None = None
    enter: Weight | None = None
    leave: Weight | None = None
    tables: tuple[ExpertTable | IntegerTable, ExpertTable | IntegerTable] | None = None

    def packed(self, pack: Callable[[Weight], Weight]) -> "ExpertWeights":
        enter, leave = (None if each is None else pack(each) for each in (self.enter, self.leave))
        shared = None if self.shared is None else self.shared.packed(pack)
        beside = None if self.beside is None else replace(self.beside, mlp=self.beside.mlp.packed(pack))
        found = replace(self, shared=shared, beside=beside, enter=enter, leave=leave)
        assert self.stacked is not None, "packed once"
        if self.router.data.is_cuda:
            return replace(found, stacked=self.stacked.packed(pack))
        experts = tuple(each.packed(pack) for each in self.stacked.list_experts())
        found = replace(found, stacked=None, experts=experts)
        gate_up, down = make_table(each.gate_up for each in experts), make_table(each.down for each in experts)
        if gate_up is None or down is None or self.routing.weighs_inputs:
            return found
        is_widened = self.routing.is_wide and self.router.data.dtype is not torch.float32  # and packed it could not be
        router = self.router if is_widened else pack_linear(self.router)
        shared_gate = self.shared_gate
        if shared_gate is not None:
            shared_gate = pack_linear(LinearWeight(torch.nn.functional.pad(shared_gate.data, (0, 0, 0, 1))))
        return replace(found, tables=(gate_up, down), router=router, shared_gate=shared_gate)


def apply_mlp(
    x: torch.Tensor,
    weights: MlpWeights | ExpertWeights,
    gate: Callable[[torch.Tensor], torch.Tensor],
    routed: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, H] for x [T, H]. routed [T, H]: what the router takes instead of x."""
    if isinstance(weights, MlpWeights):
        return linear(gate(linear(x, weights.gate_up)), weights.down)
    shares, chosen = route(x if routed is None else routed, weights)
    given, taken = None, x if weights.enter is None else linear(x, weights.enter)
    if weights.routing.weighs_inputs:
        given, shares = (taken[:, None] * shares[..., None]).flatten(0, 1), torch.ones_like(shares)
    are_together = len(x) <= _FEW_ROWS or not is_for_tiles(x)
    if weights.tables is not None and are_together and compiled.serves(x) and taken.is_contiguous():
        gate_up, down = weights.tables
        mixed = mix(multiply_experts(gate(multiply_experts(taken, chosen, gate_up)), chosen, down), shares)
    elif len(x) == 1 and weights.stacked is None:  # nothing to sort
        rows = [taken] * chosen.shape[1] if given is None else given.split(1)
        of_experts = zip(rows, chosen[0].tolist(), strict=True)
        mixed = shares @ torch.cat([apply_mlp(row, weights.experts[expert], gate) for row, expert in of_experts])
    else:
        mixed = (_apply_sorted(taken, weights, chosen, gate, given).unflatten(0, chosen.shape) * shares[..., None]).sum(1)
    if weights.leave is not None:
        mixed = linear(mixed, weights.leave)
    if weights.shared is None:
        return mixed
    shared = apply_mlp(x, weights.shared, gate)
    if weights.shared_gate is not None:
        shared = weigh_by_sigmoid(shared, linear(x, weights.shared_gate)[:, :1])
    return add(mixed, shared)


def apply_beside(
    x: torch.Tensor,
    before: torch.Tensor,
    weights: ExpertWeights,
    beside: BesideWeights,
    gate: Callable[[torch.Tensor], torch.Tensor],
    eps: float,
    add_up: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """[T, H] of an MLP and of experts beside it: x [T, H] is `before` as the MLP takes it. add_up: over the ranks."""
    of_mlp, _ = rms_norm(add_up(apply_mlp(x, beside.mlp, gate)), beside.mlp_norm, eps)
    taken, routed = (rms_norm(before, norm, eps)[0] for norm in (beside.input_norm, beside.router_norm))
    of_experts, _ = rms_norm(add_up(apply_mlp(taken, weights, gate, routed)), beside.experts_norm, eps)
    return add(of_mlp, of_experts)


def beside_destinations(weights: ExpertWeights, beside: BesideWeights) -> Iterator[tuple[str, Destination]]:
    """(name within the layer, destination), without those of MLPs. What the router takes is divided by the root of its size."""
    assert weights.scales is not None, "they have both"
    yield "router.per_expert_scale", take_all(weights.scales)
    size = beside.router_norm.shape
    yield "router.scale", Destination(beside.router_norm, tuple(size), lambda stored: stored.float() * size.numel() ** -0.5)
    yield "post_feedforward_layernorm_1.weight", take_all(beside.mlp_norm)
    yield "post_feedforward_layernorm_2.weight", take_all(beside.experts_norm)
    yield "pre_feedforward_layernorm_2.weight", take_all(beside.input_norm)


def _apply_sorted(
    x: torch.Tensor,
    weights: ExpertWeights,
    chosen: torch.Tensor,
    gate: Callable[[torch.Tensor], torch.Tensor],
    given: torch.Tensor | None,
) -> torch.Tensor:
    """What each token's experts give [T * num_chosen, H], token by token. given [T * num_chosen, H]: what they get; None: x."""
    by_expert, order = chosen.flatten().sort(stable=True)  # by expert, and by token within
    sorted_rows = x.index_select(0, order // chosen.shape[1]) if given is None else given.index_select(0, order)
    # Where each expert's rows begin [E + 1].
    starts = torch.searchsorted(by_expert, torch.arange(len(weights.router.data) + 1, device=x.device))
    if weights.stacked is not None:
        starts = starts.int()
        made = gate(grouped_linear(sorted_rows, weights.stacked.gate_up, starts))
        made = grouped_linear(made, weights.stacked.down, starts)
    else:
        bounds = starts.tolist()
        rows = [(expert, *bounds[index : index + 2]) for index, expert in enumerate(weights.experts)]
        made = torch.cat([apply_mlp(sorted_rows[a:b], expert, gate) for expert, a, b in rows if a < b])
    return torch.empty_like(made).index_copy_(0, order, made)


def route(x: torch.Tensor, weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of each token's experts, and which they are: [T, num_chosen] each. Scores are in float32."""
    routing = weights.routing
    if routing.is_wide and x.dtype is not torch.float32:
        logits = torch.nn.functional.linear(x.float(), weights.router.data.float(), weights.router.bias)
    else:
        logits = linear(x, weights.router)
    if compiled.serves(x) and logits.dtype is x.dtype and routing.num_chosen_groups == routing.num_groups:
        least = routing.least if routing.is_renormalised else None
        of_experts = {"correction": weights.correction, "scales": weights.scales}
        return choose(logits, routing.num_chosen, routing.scale, least, is_sigmoid=routing.scoring == "sigmoid", **of_experts)
    logits = logits.float()
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(-1)
    merits = scores if weights.correction is None else scores + weights.correction
    if routing.num_chosen_groups < routing.num_groups:
        merits = merits.masked_fill(~_in_best_groups(merits, routing), -torch.inf)
    best, chosen = merits.topk(routing.num_chosen)
    shares = best if merits is scores else scores.gather(1, chosen)
    if routing.is_renormalised:
        shares = shares / (shares.sum(-1, keepdim=True) + routing.least)
    if routing.scale != 1.0:
        shares = shares * routing.scale
    if weights.scales is not None:
        shares = shares * weights.scales[chosen]
    return shares.to(x.dtype), chosen


def _in_best_groups(merits: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Which experts [T, E] belong to the groups that a token may choose from."""
    grouped = merits.unflatten(1, (routing.num_groups, -1))
    worth = grouped.amax(-1) if routing.group_score == "best" else grouped.topk(2)[0].sum(-1)
    groups = worth.topk(routing.num_chosen_groups, sorted=False)[1]
    may = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, groups, True)
    return may[..., None].expand(grouped.shape).flatten(1)
