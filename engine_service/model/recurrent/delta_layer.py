"""A gated delta net as a layer of the decoder: projections, the recurrence of each row of a step on its state, and the gate.

Follows transformers' Qwen3-Next in the order of its operations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvkeeper.kernels.activations.linear import linear, pack_linear
from kvkeeper.kernels.recurrent.delta_rule import delta_decode, delta_prefill
from kvkeeper.kernels.recurrent.gated_norm import gated_norm
from kvkeeper.kernels.types import DeltaInputs, LinearWeight

from ..checkpoint.destination import Destination, Empty, take_all
from ..experts import Weight
from .delta_config import DeltaNetShape
from .state_pages import StateMetadata


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """H hidden, C convolved numbers of a token, Hv heads of values of Dv dimensions.

    Attributes:
        mixed: [C + Hv Dv, H]: queries, keys and values, each head by head, then what the outputs are gated by.
        gates: [2 Hv, H]: how much each head corrects, and how much it forgets. They stay in the weights' own dtype.
        conv: [C, kernel].
        decay_bias, decay_log: float32 [Hv]; a head forgets at exp(decay_log) times the softplus of its gate and the bias.
        norm: [Dv], of each head's outputs.
    """

    mixed: Weight
    gates: LinearWeight
    conv: torch.Tensor
    decay_bias: torch.Tensor
    decay_log: torch.Tensor
    norm: torch.Tensor

    def packed(self, pack: Callable[[Weight], Weight]) -> "DeltaWeights":
        return replace(self, mixed=pack(self.mixed), gates=pack_linear(self.gates))


def delta_layer(
    x: torch.Tensor, weights: DeltaWeights, shape: DeltaNetShape, eps: float, metadata: StateMetadata, at: int
) -> torch.Tensor:
    """Heads' outputs [T, Hv * Dv], before the output projection, for x [T, H]. at: the layer's place in its group."""
    mixed, gate = linear(x, weights.mixed).split((shape.conv_dim, shape.num_value_heads * shape.value_dim), 1)
    inputs = DeltaInputs(mixed, linear(x, weights.gates), weights.conv, weights.decay_bias, weights.decay_log)
    out = mixed.new_empty(len(x), shape.num_value_heads, shape.value_dim)
    if metadata.rows is not None:
        delta_decode(inputs, metadata.layers[at], metadata.rows, out)
    if metadata.chunks is not None:
        delta_prefill(inputs, metadata.layers[at], metadata.chunks, out)
    return gated_norm(out, gate, weights.norm, eps)


def allocate_delta(shape: DeltaNetShape, hidden_size: int, empty: Empty) -> DeltaWeights:
    """Empty weights of one layer."""
    heads, outputs = shape.num_value_heads, shape.num_value_heads * shape.value_dim
    return DeltaWeights(
        mixed=LinearWeight(empty(shape.conv_dim + outputs, hidden_size)),
        gates=LinearWeight(empty(2 * heads, hidden_size)),
        conv=empty(shape.conv_dim, shape.kernel),
        decay_bias=empty(heads).float(),
        decay_log=empty(heads).float(),
        norm=empty(shape.value_dim),
    )


def delta_destinations(shape: DeltaNetShape, weights: DeltaWeights, *, is_mixed: bool) -> Iterator[tuple[str, Destination]]:
    """(name within the layer, destination) of every stored tensor but the output projection. is_mixed: as of DeltaFamily."""
    assert isinstance(weights.mixed, LinearWeight), "weights are quantised when all are read"
    keys, values = shape.key_dim, shape.num_value_heads // shape.num_key_heads * shape.value_dim
    each = shape.num_value_heads // shape.num_key_heads
    if is_mixed:
        yield "linear_attn.in_proj_qkvz.weight", _by_kind(weights.mixed.data, (keys, keys, values, values), shape)
        yield "linear_attn.in_proj_ba.weight", _by_kind(weights.gates.data, (each, each), shape)
    else:
        kinds = (*weights.mixed.data.tensor_split([shape.conv_dim]), *weights.gates.data.chunk(2))
        for name, part in zip(("qkv", "z", "b", "a"), kinds, strict=True):
            yield f"linear_attn.in_proj_{name}.weight", take_all(part)
    yield "linear_attn.conv1d.weight", take_all(weights.conv[:, None])
    yield "linear_attn.dt_bias", take_all(weights.decay_bias)
    yield "linear_attn.A_log", take_all(weights.decay_log)
    yield "linear_attn.norm.weight", take_all(weights.norm)


def _by_kind(part: torch.Tensor, sizes: Sequence[int], shape: DeltaNetShape) -> Destination:
    """Stored are for each key head so many rows of every kind; `part` has all rows of a kind together."""

    def turned(stored: torch.Tensor) -> torch.Tensor:
        kinds = stored.unflatten(0, (shape.num_key_heads, -1)).split(list(sizes), 1)
        return torch.cat([kind.flatten(0, 1) for kind in kinds])

    return Destination(part, tuple(part.shape), turned)
