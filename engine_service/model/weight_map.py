"""Where every stored tensor of a Hugging Face checkpoint goes in the decoder's fused matrices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvkeeper.kernels.activations.linear_weight import LinearWeight

from .config import ModelConfig
from .decoder import DecoderWeights, LayerWeights

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
    layers = [_allocate_layer(config, empty) for _ in range(config.num_layers)]
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


def _allocate_layer(config: ModelConfig, empty: _Empty) -> LayerWeights:
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    num_rotated = config.num_heads + config.num_kv_heads

    def projection(num_out: int, num_in: int, bias: bool) -> LinearWeight:
        return LinearWeight(empty(num_out, num_in), empty(num_out) if bias else None)

    return LayerWeights(
        input_norm=empty(hidden),
        qkv=projection((num_rotated + config.num_kv_heads) * head_dim, hidden, config.qkv_bias),
        qk_norm=empty(num_rotated, head_dim) if config.qk_norm else None,
        o=projection(hidden, config.num_heads * head_dim, config.o_bias),
        post_norm=empty(hidden),
        gate_up=projection(2 * intermediate, hidden, config.mlp_bias),
        down=projection(hidden, intermediate, config.mlp_bias),
        attention_out_norm=empty(hidden) if config.out_norms else None,
        mlp_out_norm=empty(hidden) if config.out_norms else None,
    )


def _layer_destinations(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Destination]]:
    """(name within the layer, destination) of every stored tensor."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", _whole(layer.input_norm)
    if layer.attention_out_norm is None or layer.mlp_out_norm is None:
        yield "post_attention_layernorm.weight", _whole(layer.post_norm)
    else:
        yield "post_attention_layernorm.weight", _whole(layer.attention_out_norm)
        yield "pre_feedforward_layernorm.weight", _whole(layer.post_norm)
        yield "post_feedforward_layernorm.weight", _whole(layer.mlp_out_norm)
    intermediate = config.intermediate_size
    for fused, names, sizes in (
        (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q_size, kv_size, kv_size)),
        (layer.o, ("self_attn.o_proj",), (config.hidden_size,)),
        (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj"), (intermediate, intermediate)),
        (layer.down, ("mlp.down_proj",), (config.hidden_size,)),
    ):
        assert isinstance(fused, LinearWeight), "weights are quantised when all are read"
        for kind, whole in (("weight", fused.data), ("bias", fused.bias)):
            if whole is not None:
                for name, part in zip(names, whole.split(sizes), strict=True):
                    yield f"{name}.{kind}", _whole(part)
    if layer.qk_norm is not None:  # one stored weight for all heads of a kind
        yield "self_attn.q_norm.weight", Destination(layer.qk_norm[: config.num_heads], (config.head_dim,))
        yield "self_attn.k_norm.weight", Destination(layer.qk_norm[config.num_heads :], (config.head_dim,))


def _whole(part: torch.Tensor) -> Destination:
    return Destination(part, tuple(part.shape))
