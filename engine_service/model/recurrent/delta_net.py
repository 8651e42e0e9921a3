"""DeltaNet: a gated delta net as a mixer: projections, the recurrence of each row of a step on its state, and the gate.

Follows transformers' Qwen3-Next in the order of its operations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvkeeper.kernels.activations.linear import linear, pack_linear
from kvkeeper.kernels.recurrent.delta_rule import delta_decode, delta_prefill
from kvkeeper.kernels.recurrent.gated_norm import gated_norm
from kvkeeper.kernels.types import DeltaInputs, DeltaState, LinearWeight

from ..checkpoint.destination import Destination, Empty, Part, take_all, take_kinds
from ..experts import Weight
from .delta_config import DeltaNetShape
from .state_pages import StateMetadata


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A Mixer. H hidden, C convolved numbers of a token, Hv heads of values of Dv dimensions.

    Attributes:
        mixed: [C + Hv Dv, H]: queries, keys and values, each head by head, then what the outputs are gated by.
        gates: [2 Hv, H]: how much each head corrects, and how much it forgets. They stay in the weights' own dtype.
        conv: [C, kernel].
        decay_bias, decay_log: float32 [Hv]; a head forgets at exp(decay_log) times the softplus of its gate and the bias.
        norm: [Dv], of each head's outputs.
    """

    shape: DeltaNetShape
    mixed: Weight
    gates: LinearWeight
    conv: torch.Tensor
    decay_bias: torch.Tensor
    decay_log: torch.Tensor
    norm: torch.Tensor

    def packed(self, pack: Callable[[Weight], Weight]) -> "DeltaNet":
        """The same, with projections as `pack` gives them."""
        return replace(self, mixed=pack(self.mixed), gates=pack_linear(self.gates))

    def run(self, x: torch.Tensor, eps: float, metadata: StateMetadata, at: int) -> torch.Tensor:
        """Heads' outputs [T, Hv * Dv], before the output projection, for x [T, H]. at: the layer's place in its group."""
        shape = self.shape
        mixed, gate = linear(x, self.mixed).split((shape.conv_dim, shape.num_outputs), 1)
        inputs = DeltaInputs(mixed, linear(x, self.gates), self.conv, self.decay_bias, self.decay_log)
        out = run_rows(inputs, metadata, at, (shape.num_value_heads, shape.value_dim))
        return gated_norm(out, gate, self.norm, eps)

    def destinations(self, whole: DeltaNetShape, own: Part) -> Iterator[tuple[str, Destination]]:
        """See Mixer."""
        shape, mixed = self.shape, self.mixed
        assert isinstance(mixed, LinearWeight), "weights are quantised when all are read"
        keys, each = shape.key_dim, shape.num_value_heads // shape.num_key_heads
        values, heads = each * shape.value_dim, (whole.num_value_heads,)
        if shape.is_mixed:
            yield "linear_attn.in_proj_qkvz.weight", _by_kind(mixed.data, (keys, keys, values, values), whole, own)
            yield "linear_attn.in_proj_ba.weight", _by_kind(self.gates.data, (each, each), whole, own)
        else:
            kinds = (*mixed.data.tensor_split([shape.conv_dim]), *self.gates.data.chunk(2))
            sizes = whole.conv_sizes, (whole.num_outputs,), heads, heads
            for name, part, of_kinds in zip(("qkv", "z", "b", "a"), kinds, sizes, strict=True):
                yield f"linear_attn.in_proj_{name}.weight", take_kinds(part, of_kinds, own)
        yield "linear_attn.conv1d.weight", take_kinds(self.conv[:, None], whole.conv_sizes, own)
        yield "linear_attn.dt_bias", take_kinds(self.decay_bias, heads, own)
        yield "linear_attn.A_log", take_kinds(self.decay_log, heads, own)
        yield "linear_attn.norm.weight", take_all(self.norm)


def run_rows(inputs: DeltaInputs, metadata: StateMetadata, at: int, heads: tuple[int, int]) -> torch.Tensor:
    """Outputs [T, Hv, Dv] of a step's rows, whose states are read and written. heads: Hv, Dv."""
    state, out = DeltaState(*metadata.layers[at]), inputs.mixed.new_empty(len(inputs.mixed), *heads)
    if metadata.rows is not None:
        delta_decode(inputs, state, metadata.rows, out)
    if metadata.chunks is not None:
        delta_prefill(inputs, state, metadata.chunks, out)
    return out


def allocate_delta_net(shape: DeltaNetShape, hidden_size: int, empty: Empty) -> DeltaNet:
    """Empty weights of one layer."""
    heads, outputs = shape.num_value_heads, shape.num_outputs
    return DeltaNet(
        shape,
        mixed=LinearWeight(empty(shape.conv_dim + outputs, hidden_size)),
        gates=LinearWeight(empty(2 * heads, hidden_size)),
        conv=empty(shape.conv_dim, shape.kernel),
        decay_bias=empty(heads).float(),
        decay_log=empty(heads).float(),
        norm=empty(shape.value_dim),
    )


def _by_kind(part: torch.Tensor, sizes: Sequence[int], whole: DeltaNetShape, own: Part) -> Destination:
    """Stored are for each key head so many rows of every kind; `part` has all rows of a kind together, of the rank's heads."""
    heads, of_head = own(whole.num_key_heads), sum(sizes)
    place = (slice(heads.start * of_head, heads.stop * of_head),)

    def turned(stored: torch.Tensor) -> torch.Tensor:
        kinds = stored.unflatten(0, (len(heads), -1)).split(list(sizes), 1)
        return torch.cat([kind.flatten(0, 1) for kind in kinds])

    shape = whole.num_key_heads * of_head, *part.shape[1:]
    return Destination(part, shape, turned, (place,))
