"""Inputs of a layer's own: each token gives each layer a short vector, which a gate of the layer mixes into its result.

The vectors come from an embedding of the token and from a projection of its first hidden state, so they are known before the
first layer (Gemma 3n and 4). Owns how they are made and added, and where their stored tensors go.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.types import LinearWeight

from .checkpoint.destination import Destination, Empty, take_all
from .experts import Weight
from .layer_shapes import LayerInputsConfig


@dataclass(frozen=True, slots=True)
class InputWeights:
    """What makes the inputs of all layers. embed: [rows, L P], which counts `scale` times; projection: [L P, H]; norm: [P]."""

    embed: torch.Tensor
    projection: Weight
    norm: torch.Tensor
    scale: float

    def packed(self, pack: Callable[[Weight], Weight]) -> "InputWeights":
        return replace(self, projection=pack(self.projection))


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """What mixes in the input of one layer. gate: [P, H]; up: [H, P]; norm: [H], of what they give."""

    gate: Weight
    up: Weight
    norm: torch.Tensor

    def packed(self, pack: Callable[[Weight], Weight]) -> "LayerInputWeights":
        return LayerInputWeights(pack(self.gate), pack(self.up), self.norm)


def make_layer_inputs(token_ids: torch.Tensor, x: torch.Tensor, weights: InputWeights, eps: float) -> torch.Tensor:
    """The inputs of all layers [T, L, P] for int64 [T] and the embedded tokens [T, H]."""
    own = functional.embedding(token_ids, weights.embed) * weights.scale
    projected = (linear(x, weights.projection) * x.shape[1] ** -0.5).unflatten(1, (-1, len(weights.norm)))
    return (rms_norm(projected, weights.norm, eps)[0] + own.view(projected.shape)) * 2**-0.5


def gate_layer_input(
    x: torch.Tensor,
    given: torch.Tensor,
    weights: LayerInputWeights,
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    eps: float,
) -> torch.Tensor:
    """What the layer's input [T, P] adds to x [T, H]."""
    return rms_norm(linear(gate(linear(x, weights.gate), given), weights.up), weights.norm, eps)[0]


def allocate_inputs(config: LayerInputsConfig, num_layers: int, hidden: int, empty: Empty) -> InputWeights:
    total, norm = num_layers * config.size, empty(config.size)
    scale = float(torch.tensor(config.size**0.5, dtype=norm.dtype))  # as transformers rounds it
    return InputWeights(empty(config.vocab_size, total), LinearWeight(empty(total, hidden)), norm, scale)


def allocate_layer_input(config: LayerInputsConfig, hidden: int, empty: Empty) -> LayerInputWeights:
    return LayerInputWeights(LinearWeight(empty(config.size, hidden)), LinearWeight(empty(hidden, config.size)), empty(hidden))


def input_destinations(weights: InputWeights) -> Iterator[tuple[str, Destination]]:
    """(name within the model, destination)."""
    assert isinstance(weights.projection, LinearWeight), "weights are quantised when all are read"
    yield "embed_tokens_per_layer.weight", take_all(weights.embed)
    yield "per_layer_model_projection.weight", take_all(weights.projection.data)
    yield "per_layer_projection_norm.weight", take_all(weights.norm)


def layer_input_destinations(weights: LayerInputWeights) -> Iterator[tuple[str, Destination]]:
    """(name within the layer, destination)."""
    assert isinstance(weights.gate, LinearWeight) and isinstance(weights.up, LinearWeight), "not quantised yet"
    yield "per_layer_input_gate.weight", take_all(weights.gate.data)
    yield "per_layer_projection.weight", take_all(weights.up.data)
    yield "post_per_layer_input_norm.weight", take_all(weights.norm)
