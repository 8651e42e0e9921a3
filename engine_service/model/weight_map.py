"""Where every stored tensor of a Hugging Face checkpoint goes in the decoder's fused matrices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvkeeper.kernels.activations.linear_weight import LinearWeight

from .config import ModelConfig
from .decoder import DecoderWeights, LayerWeights
from .experts import ExpertWeights, MlpWeights, StackedExperts, Weight
from .families.family import ExpertNames
from .families.table import FAMILIES
from .rope import rotated_order

_Empty = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Destination:
    """A stored tensor of `shape` is copied to `part`, a view of a parameter (broadcast where part is larger).

    turned: how the stored tensor is looked at first; None: as it is.
    """

    part: torch.Tensor
    shape: tuple[int, ...]
    turned: Callable[[torch.Tensor], torch.Tensor] | None = None

    def fill(self, stored: torch.Tensor) -> None:
        self.part.copy_(stored if self.turned is None else self.turned(stored))


def allocate_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[DecoderWeights, dict[str, Destination]]:
    """Empty weights, and by stored name the destinations that together fill them."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    embed, norm = empty(config.vocab_size, config.hidden_size), empty(config.hidden_size)
    lm_head = embed if config.tied_embeddings else empty(config.vocab_size, config.hidden_size)
    layers = [_allocate_layer(config, index, empty) for index in range(config.num_layers)]
    destinations = {"model.embed_tokens.weight": _whole(embed), "model.norm.weight": _whole(norm)}
    if not config.tied_embeddings:
        destinations["lm_head.weight"] = _whole(lm_head)
    for index, layer in enumerate(layers):
        for name, destination in _layer_destinations(config, layer):
            destinations[f"model.layers.{index}.{name}"] = destination
    return DecoderWeights(embed, layers, norm, LinearWeight(lm_head)), destinations


def norms_of(weights: DecoderWeights) -> Iterator[torch.Tensor]:
    """Every norm's weight."""
    yield weights.norm
    for layer in weights.layers:
        norms = (layer.input_norm, layer.post_norm, layer.qk_norm, layer.attention_out_norm, layer.mlp_out_norm)
        yield from (norm for norm in norms if norm is not None)


def pair_rotated(config: ModelConfig, weights: DecoderWeights) -> None:
    """Bring the dimensions of queries and keys into the order of rotated_order, where only a part of each head is rotated."""
    rotated_dim = config.rope.rotated_dim(config.head_dim)
    if rotated_dim == config.head_dim:
        return
    order = rotated_order(config.head_dim, rotated_dim)
    num_rows = (config.num_heads + config.num_kv_heads) * config.head_dim
    for layer in weights.layers:
        assert isinstance(layer.qkv, LinearWeight) and layer.qkv.bias is None and layer.qk_norm is None, "no such family"
        heads = layer.qkv.data[:num_rows].unflatten(0, (-1, config.head_dim))
        heads.copy_(heads[:, order.to(heads.device)])


def _allocate_layer(config: ModelConfig, index: int, empty: _Empty) -> LayerWeights:
    hidden, head_dim = config.hidden_size, config.head_dim
    num_rotated = config.num_heads + config.num_kv_heads

    def projection(num_out: int, num_in: int, bias: bool) -> LinearWeight:
        return LinearWeight(empty(num_out, num_in), empty(num_out) if bias else None)

    def mlp(intermediate: int) -> MlpWeights:
        gate_up = projection(2 * intermediate, hidden, config.mlp_bias)
        return MlpWeights(gate_up, projection(hidden, intermediate, config.mlp_bias))

    has_experts = config.experts is not None and index in config.experts.layers
    return LayerWeights(
        input_norm=None if config.norms == "after" else empty(hidden),
        qkv=projection((num_rotated + config.num_kv_heads) * head_dim, hidden, config.qkv_bias),
        qk_norm=None if config.qk_norm == "none" else empty(num_rotated, head_dim),
        o=projection(hidden, config.num_heads * head_dim, config.o_bias),
        post_norm=None if config.norms == "after" else empty(hidden),
        mlp=_allocate_experts(config, empty) if has_experts else mlp(config.intermediate_size),
        attention_out_norm=None if config.norms == "before" else empty(hidden),
        mlp_out_norm=None if config.norms == "before" else empty(hidden),
        sink_logits=empty(config.num_heads).float() if config.has_sink_logits else None,
    )


def _allocate_experts(config: ModelConfig, empty: _Empty) -> ExpertWeights:
    """Each expert is a view of all of them, which lie in one tensor."""
    experts, stored = config.experts, FAMILIES[config.family].experts
    assert experts is not None and stored is not None, "these layers come from that family"
    num, hidden, inner = experts.num_experts, config.hidden_size, experts.intermediate_size

    def stack(num_out: int, num_in: int) -> LinearWeight:
        return LinearWeight(empty(num, num_out, num_in), empty(num, num_out) if stored.has_bias else None)

    def one_of(weight: LinearWeight, index: int) -> LinearWeight:
        return LinearWeight(weight.data[index], None if weight.bias is None else weight.bias[index])

    stacked = StackedExperts(stack(2 * inner, hidden), stack(hidden, inner))
    return ExpertWeights(
        router=LinearWeight(empty(num, hidden), empty(num) if stored.has_bias else None),
        experts=tuple(MlpWeights(one_of(stacked.gate_up, index), one_of(stacked.down, index)) for index in range(num)),
        routing=experts.routing,
        stacked=stacked,
    )


def _layer_destinations(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Destination]]:
    """(name within the layer, destination) of every stored tensor."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    is_inner = layer.attention_out_norm is not None  # then the name of the norm between is that of attention's own
    for name, norm in (
        ("input_layernorm", layer.input_norm),
        ("pre_feedforward_layernorm" if is_inner else "post_attention_layernorm", layer.post_norm),
        ("post_attention_layernorm", layer.attention_out_norm),
        ("post_feedforward_layernorm", layer.mlp_out_norm),
    ):
        if norm is not None:
            yield f"{name}.weight", _whole(norm)
    if FAMILIES[config.family].is_fused:
        yield from _parts(layer.qkv, ("self_attn.qkv_proj",), (q_size + 2 * kv_size,))
    else:
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        yield from _parts(layer.qkv, names, (q_size, kv_size, kv_size))
    yield from _parts(layer.o, ("self_attn.o_proj",), (config.hidden_size,))
    if layer.sink_logits is not None:
        yield "self_attn.sinks", _whole(layer.sink_logits)
    yield from _mlp_destinations(config, layer.mlp)
    if layer.qk_norm is not None:
        for name, part in (("q_norm", layer.qk_norm[: config.num_heads]), ("k_norm", layer.qk_norm[config.num_heads :])):
            is_whole = config.qk_norm == "whole"  # otherwise one stored weight is for all heads of a kind
            yield f"self_attn.{name}.weight", _whole(part.flatten()) if is_whole else Destination(part, (config.head_dim,))


def _mlp_destinations(config: ModelConfig, mlp: MlpWeights | ExpertWeights) -> Iterator[tuple[str, Destination]]:
    names, width = ("gate_proj", "up_proj", "down_proj"), config.intermediate_size
    members = {"mlp": mlp} if isinstance(mlp, MlpWeights) else {}
    if isinstance(mlp, ExpertWeights):
        stored = FAMILIES[config.family].experts
        assert stored is not None and config.experts is not None, "these layers come from that family"
        yield from _parts(mlp.router, (f"{stored.block}.{stored.router}",), (config.experts.num_experts,))
        if stored.form == "stacked":
            assert mlp.stacked is not None, "nothing is packed yet"
            yield from _stacked_destinations(stored, mlp.stacked)
            return
        names, width = stored.projections, config.experts.intermediate_size
        members = {f"{stored.block}.experts.{index}": expert for index, expert in enumerate(mlp.experts)}
    gate, up, down = names
    for place, member in members.items():
        if FAMILIES[config.family].is_fused:
            yield from _parts(member.gate_up, (f"{place}.gate_up_proj",), (2 * width,))
        else:
            yield from _parts(member.gate_up, (f"{place}.{gate}", f"{place}.{up}"), (width, width))
        yield from _parts(member.down, (f"{place}.{down}",), (config.hidden_size,))


def _stacked_destinations(stored: ExpertNames, stacked: StackedExperts) -> Iterator[tuple[str, Destination]]:
    """Inputs come before outputs, and each gate is followed by its up."""
    gate_up, _, down = stored.projections
    for name, weight, is_paired in ((gate_up, stacked.gate_up, True), (down, stacked.down, False)):
        for suffix, whole in (("", weight.data.transpose(1, 2)), ("_bias", weight.bias)):
            if whole is not None:
                part = whole.unflatten(-1, (2, -1)).transpose(-1, -2) if is_paired else whole
                turned = _in_pairs if is_paired else None
                yield f"{stored.block}.experts.{name}{suffix}", Destination(part, tuple(whole.shape), turned)


def _in_pairs(stored: torch.Tensor) -> torch.Tensor:
    return stored.unflatten(-1, (-1, 2))


def _parts(fused: Weight, names: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[tuple[str, Destination]]:
    """Weights, and biases where there are, of the projections that lie in one matrix one after the other."""
    assert isinstance(fused, LinearWeight), "weights are quantised when all are read"
    for kind, whole in (("weight", fused.data), ("bias", fused.bias)):
        if whole is not None:
            for name, part in zip(names, whole.split(sizes), strict=True):
                yield f"{name}.{kind}", _whole(part)


def _whole(part: torch.Tensor) -> Destination:
    return Destination(part, tuple(part.shape))
