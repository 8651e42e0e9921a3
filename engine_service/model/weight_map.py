"""Where every stored tensor of a Hugging Face checkpoint goes in the decoder's fused matrices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine_service.model.config import ModelConfig
from engine_service.model.decoder import DecoderWeights, LayerWeights

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
    layers = tuple(_allocate_layer(config, empty) for _ in range(config.num_layers))
    destinations = {"model.embed_tokens.weight": _whole(embed), "model.norm.weight": _whole(norm)}
    if not config.tied_embeddings:
        destinations["lm_head.weight"] = _whole(lm_head)
    for index, layer in enumerate(layers):
        for name, destination in _layer_destinations(config, layer):
            destinations[f"model.layers.{index}.{name}"] = destination
    return DecoderWeights(embed, layers, norm, lm_head), destinations


def _allocate_layer(config: ModelConfig, empty: _Empty) -> LayerWeights:
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    num_rotated = config.num_heads + config.num_kv_heads
    qkv_size = (num_rotated + config.num_kv_heads) * head_dim
    return LayerWeights(
        input_norm=empty(hidden),
        qkv=empty(qkv_size, hidden),
        qkv_bias=empty(qkv_size) if config.qkv_bias else None,
        qk_norm=empty(num_rotated, head_dim) if config.qk_norm else None,
        o=empty(hidden, config.num_heads * head_dim),
        o_bias=empty(hidden) if config.o_bias else None,
        post_norm=empty(hidden),
        gate_up=empty(2 * intermediate, hidden),
        gate_up_bias=empty(2 * intermediate) if config.mlp_bias else None,
        down=empty(hidden, intermediate),
        down_bias=empty(hidden) if config.mlp_bias else None,
    )


def _layer_destinations(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Destination]]:
    """(name within the layer, destination) of every stored tensor."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", _whole(layer.input_norm)
    yield "post_attention_layernorm.weight", _whole(layer.post_norm)
    for fused, kind in ((layer.qkv, "weight"), (layer.qkv_bias, "bias")):
        if fused is not None:
            for name, part in zip("qkv", fused.split((q_size, kv_size, kv_size)), strict=True):
                yield f"self_attn.{name}_proj.{kind}", _whole(part)
    for fused, kind in ((layer.gate_up, "weight"), (layer.gate_up_bias, "bias")):
        if fused is not None:
            for name, part in zip(("gate", "up"), fused.chunk(2), strict=True):
                yield f"mlp.{name}_proj.{kind}", _whole(part)
    for name, whole in (
        ("self_attn.o_proj.weight", layer.o),
        ("self_attn.o_proj.bias", layer.o_bias),
        ("mlp.down_proj.weight", layer.down),
        ("mlp.down_proj.bias", layer.down_bias),
    ):
        if whole is not None:
            yield name, _whole(whole)
    if layer.qk_norm is not None:  # one stored weight for all heads of a kind
        yield "self_attn.q_norm.weight", Destination(layer.qk_norm[: config.num_heads], (config.head_dim,))
        yield "self_attn.k_norm.weight", Destination(layer.qk_norm[config.num_heads :], (config.head_dim,))


def _whole(part: torch.Tensor) -> Destination:
    return Destination(part, tuple(part.shape))
