"""Where every stored tensor of a Hugging Face checkpoint goes in the decoder's fused matrices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvkeeper.kernels.activations.linear_weight import LinearWeight

from .config import ModelConfig
from .decoder import DecoderWeights, LayerWeights
from .experts import ExpertWeights, MlpWeights, Weight
from .families.table import FAMILIES
from .rope import rotated_order

_Empty = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Destination:
    """A stored tensor of `shape` is copied to `part`, a view of a parameter (broadcast where part is larger)."""

    part: torch.Tensor
    shape: tuple[int, ...]


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

    experts = config.experts if config.experts is not None and index in config.experts.layers else None
    return LayerWeights(
        input_norm=None if config.norms == "after" else empty(hidden),
        qkv=projection((num_rotated + config.num_kv_heads) * head_dim, hidden, config.qkv_bias),
        qk_norm=None if config.qk_norm == "none" else empty(num_rotated, head_dim),
        o=projection(hidden, config.num_heads * head_dim, config.o_bias),
        post_norm=None if config.norms == "after" else empty(hidden),
        mlp=mlp(config.intermediate_size)
        if experts is None
        else ExpertWeights(
            projection(experts.num_experts, hidden, False),
            tuple(mlp(experts.intermediate_size) for _ in range(experts.num_experts)),
            experts.num_chosen,
            experts.is_renormalised,
        ),
        attention_out_norm=None if config.norms == "before" else empty(hidden),
        mlp_out_norm=None if config.norms == "before" else empty(hidden),
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
        names, width = stored.projections, config.experts.intermediate_size
        members = {f"{stored.block}.experts.{index}": expert for index, expert in enumerate(mlp.experts)}
        yield f"{stored.block}.gate.weight", _whole(mlp.router.data)
    gate, up, down = names
    for place, member in members.items():
        if FAMILIES[config.family].is_fused:
            yield from _parts(member.gate_up, (f"{place}.gate_up_proj",), (2 * width,))
        else:
            yield from _parts(member.gate_up, (f"{place}.{gate}", f"{place}.{up}"), (width, width))
        yield from _parts(member.down, (f"{place}.{down}",), (config.hidden_size,))


def _parts(fused: Weight, names: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[tuple[str, Destination]]:
    """Weights, and biases where there are, of the projections that lie in one matrix one after the other."""
    assert isinstance(fused, LinearWeight), "weights are quantised when all are read"
    for kind, whole in (("weight", fused.data), ("bias", fused.bias)):
        if whole is not None:
            for name, part in zip(names, whole.split(sizes), strict=True):
                yield f"{name}.{kind}", _whole(part)


def _whole(part: torch.Tensor) -> Destination:
    return Destination(part, tuple(part.shape))
