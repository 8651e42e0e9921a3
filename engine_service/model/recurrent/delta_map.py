"""Where the stored tensors of a gated delta net go: its heads are stored key head by key head, and computed kind by kind."""

from collections.abc import Iterator, Sequence

import torch

from kvkeeper.kernels.activations.linear_weight import LinearWeight

from ..checkpoint.destination import Destination, Empty, all_of
from .delta_config import DeltaNetShape
from .delta_layer import DeltaWeights


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


def delta_destinations(shape: DeltaNetShape, weights: DeltaWeights) -> Iterator[tuple[str, Destination]]:
    """(name within the layer, destination) of every stored tensor but the output projection."""
    assert isinstance(weights.mixed, LinearWeight), "weights are quantised when all are read"
    keys, values = shape.key_dim, shape.num_value_heads // shape.num_key_heads * shape.value_dim
    each = shape.num_value_heads // shape.num_key_heads
    yield "linear_attn.in_proj_qkvz.weight", _by_kind(weights.mixed.data, (keys, keys, values, values), shape)
    yield "linear_attn.in_proj_ba.weight", _by_kind(weights.gates.data, (each, each), shape)
    yield "linear_attn.conv1d.weight", all_of(weights.conv[:, None])
    yield "linear_attn.dt_bias", all_of(weights.decay_bias)
    yield "linear_attn.A_log", all_of(weights.decay_log)
    yield "linear_attn.norm.weight", all_of(weights.norm)


def _by_kind(part: torch.Tensor, sizes: Sequence[int], shape: DeltaNetShape) -> Destination:
    """Stored are for each key head so many rows of every kind; `part` has all rows of a kind together."""

    def turned(stored: torch.Tensor) -> torch.Tensor:
        kinds = stored.unflatten(0, (shape.num_key_heads, -1)).split(list(sizes), 1)
        return torch.cat([kind.flatten(0, 1) for kind in kinds])

    return Destination(part, tuple(part.shape), turned)
