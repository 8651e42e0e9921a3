"""Scan: Mamba 2 (arXiv 2405.21060) as a mixer: projections, the recurrence of each row of a step on its state, and the gate.

Follows transformers' Nemotron-H in the order of its operations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvkeeper.kernels.activations.linear import linear, pack_linear
from kvkeeper.kernels.recurrent.gated_norm import gated_norm
from kvkeeper.kernels.types import DeltaInputs, LinearWeight, ScanRule

from ..checkpoint.destination import Destination, Empty, Part, take_kinds
from ..experts import Weight
from .delta_net import run_rows
from .scan_config import ScanShape
from .state_pages import StateMetadata


@dataclass(frozen=True, slots=True)
class Scan:
    """A Mixer. H hidden, C convolved numbers of a token, Hv heads of values of Dv dimensions.

    Attributes:
        mixed: [C + Hv Dv, H]: queries (C), keys (B) and values (x), each head by head, then what the outputs are gated by.
        gates: [Hv, H], of the steps. They stay in the weights' own dtype. Until it is packed it is of one tensor with `mixed`.
        conv: [C, kernel].
        decay_bias, decay_log: float32 [Hv]; a head forgets at exp(decay_log) times its step, which has the bias.
        rule: what else the recurrence takes.
        norm: [groups, Hv Dv / groups], of gated outputs.
    """

    shape: ScanShape
    mixed: Weight
    gates: LinearWeight
    conv: torch.Tensor
    decay_bias: torch.Tensor
    decay_log: torch.Tensor
    rule: ScanRule
    norm: torch.Tensor
    whole: LinearWeight | None

    def packed(self, pack: Callable[[Weight], Weight]) -> "Scan":
        """The same, with projections as `pack` gives them."""
        return replace(self, mixed=pack(self.mixed), gates=pack_linear(self.gates), whole=None)

    def run(self, x: torch.Tensor, eps: float, metadata: StateMetadata, at: int) -> torch.Tensor:
        """Heads' outputs [T, Hv * Dv], before the output projection, for x [T, H]. at: the layer's place in its group."""
        shape = self.shape
        mixed, gate = linear(x, self.mixed).split((shape.conv_dim, shape.num_outputs), 1)
        inputs = DeltaInputs(mixed, linear(x, self.gates), self.conv, self.decay_bias, self.decay_log, self.rule)
        out = run_rows(inputs, metadata, at, (shape.num_heads, shape.head_dim))
        return gated_norm(out.view(len(x), shape.num_groups, -1), gate, self.norm, eps)

    def destinations(self, whole: ScanShape, own: Part) -> Iterator[tuple[str, Destination]]:
        """See Mixer. Stored are what the outputs are gated by, values, keys, queries and steps."""
        assert self.whole is not None, "nothing is packed yet"
        keys, values, heads = whole.num_groups * whole.state_size, whole.num_outputs, whole.num_heads
        convolved = values, keys, keys
        projected = values, *convolved, heads
        for kind, part in (("weight", self.whole.data), ("bias", self.whole.bias)):
            if part is not None:
                yield f"mixer.in_proj.{kind}", take_kinds(part, projected, own, (3, 2, 1, 0, 4))
        yield "mixer.conv1d.weight", take_kinds(self.conv[:, None], convolved, own, (2, 1, 0))
        if whole.has_conv_bias:
            yield "mixer.conv1d.bias", take_kinds(self.rule.conv_bias, convolved, own, (2, 1, 0))
        yield "mixer.dt_bias", take_kinds(self.decay_bias, (heads,), own)
        yield "mixer.A_log", take_kinds(self.decay_log, (heads,), own)
        yield "mixer.D", take_kinds(self.rule.skip, (heads,), own)
        yield "mixer.norm.weight", take_kinds(self.norm.flatten(), (values,), own)


def allocate_scan(shape: ScanShape, hidden_size: int, empty: Empty) -> Scan:
    """Empty weights of one layer; a bias of the convolution that is not stored is 0."""
    heads, outputs = shape.num_heads, shape.num_outputs
    sizes = [shape.conv_dim + outputs, heads]
    data, bias = empty(sum(sizes), hidden_size), empty(sum(sizes)) if shape.has_bias else None
    biases = (None, None) if bias is None else bias.split(sizes)
    mixed, gates = (LinearWeight(*each) for each in zip(data.split(sizes), biases, strict=True))
    return Scan(
        shape,
        mixed=mixed,
        gates=gates,
        conv=empty(shape.conv_dim, shape.kernel),
        decay_bias=empty(heads).float(),
        decay_log=empty(heads).float(),
        rule=ScanRule(empty(shape.conv_dim).zero_(), empty(heads).float(), shape.least, shape.most),
        norm=empty(shape.num_groups, outputs // shape.num_groups),
        whole=LinearWeight(data, bias),
    )
