"""A gated delta net as a layer of the decoder: projections, the recurrence of each row of a step on its state, and the gate.

Follows transformers' Qwen3-Next in the order of its operations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.activations.rms_norm import rms_norm
from kvkeeper.kernels.types import LinearWeight

from ..checkpoint.destination import Destination, Empty, take_all
from ..experts import Weight
from .delta_config import DeltaNetShape
from .delta_net import DeltaState, convolve, convolve_one, delta_rule, delta_rule_one
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
        return replace(self, mixed=pack(self.mixed))


def delta_layer(
    x: torch.Tensor, weights: DeltaWeights, shape: DeltaNetShape, eps: float, metadata: StateMetadata, at: int
) -> torch.Tensor:
    """Heads' outputs [T, Hv * Dv], before the output projection, for x [T, H]. at: the layer's place in its group."""
    mixed, gate = linear(x, weights.mixed).split((shape.conv_dim, shape.num_value_heads * shape.value_dim), 1)
    correction, forgetting = linear(x, weights.gates).chunk(2, 1)
    beta = correction.sigmoid().float()
    decay = -weights.decay_log.exp() * functional.softplus(forgetting.float() + weights.decay_bias)
    out = x.new_empty(len(x), shape.num_value_heads, shape.value_dim)
    if metadata.reads is not None and metadata.writes is not None:
        rows = slice(None) if metadata.decode_rows is None else metadata.decode_rows
        state = metadata.pages.read(at, metadata.reads)
        made, conv = convolve_one(mixed[rows], state.conv, weights.conv)
        out[rows], memory = delta_rule_one(*_heads(made, shape), decay[rows], beta[rows], state.memory)
        if metadata.is_written:
            metadata.pages.write(at, metadata.writes, DeltaState(memory, conv))
    if metadata.run_reads is not None:
        _compute_runs(mixed, decay, beta, weights.conv, shape, metadata, at, out)
    normed, _ = rms_norm(out, weights.norm, eps)
    return (normed.float() * functional.silu(gate.unflatten(1, (-1, shape.value_dim)).float())).to(x.dtype).flatten(1)


def _compute_runs(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    weight: torch.Tensor,
    shape: DeltaNetShape,
    metadata: StateMetadata,
    at: int,
    out: torch.Tensor,
) -> None:
    """Rows with several tokens, run by run, into their places in out [T, Hv, Dv]."""
    assert metadata.run_reads is not None
    assert metadata.run_writes is not None
    number = 0
    for place, runs in enumerate(metadata.runs):
        memory, conv = (each[0] for each in metadata.pages.read(at, metadata.run_reads[place : place + 1]))
        for first, end in runs:
            made, conv = convolve(mixed[first:end], conv, weight)
            out[first:end], memory = delta_rule(*_heads(made, shape), decay[first:end], beta[first:end], memory)
            if metadata.is_written:
                pages = metadata.run_writes[number : number + 1]
                metadata.pages.write(at, pages, DeltaState(memory[None], conv[None]))
            number += 1


def _heads(made: torch.Tensor, shape: DeltaNetShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys [..., Hk, Dk] and values [..., Hv, Dv] of what was convolved [..., C]."""
    keys = shape.num_key_heads * shape.key_dim
    q, k, v = made.split((keys, keys, made.shape[-1] - 2 * keys), -1)
    return (q.unflatten(-1, (-1, shape.key_dim)), k.unflatten(-1, (-1, shape.key_dim)), v.unflatten(-1, (-1, shape.value_dim)))


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
