"""KimiDelta: Kimi Delta Attention (arXiv 2510.26692) as a mixer: a gated delta net whose dimensions forget one by one.

Follows transformers' Kimi Linear and Ling 3 in the order of its operations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvkeeper.kernels.activations.linear import linear, pack_linear
from kvkeeper.kernels.recurrent.gated_norm import gated_norm
from kvkeeper.kernels.types import ChannelRule, DeltaInputs, LinearWeight

from ..checkpoint.destination import ALL, Destination, Empty, Part, take_all, take_kinds
from ..experts import Weight
from .delta_net import run_rows
from .kimi_delta_config import KimiDeltaShape
from .state_pages import StateMetadata


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """A Mixer. H hidden, N heads of D dimensions, R the rank of gates.

    Attributes:
        mixed: [3 N D + R, H]: queries, keys and values, each head by head, then what the outputs are gated by; without a rank
            of gates [4 N D, H].
        gates: [N + R, H]: how much each head corrects, and each of its dimensions forgets; without a rank [N + N D, H]. They
            stay in the weights' own dtype.
        forget_up, output_up: [N D, R], what makes gates of either kind. None: gates have no rank.
        conv: [3 N D, kernel].
        decay_bias: float32 [N D]. decay_log: float32 [N].
        norm: [D], of each head's outputs.
    """

    shape: KimiDeltaShape
    mixed: Weight
    gates: LinearWeight
    forget_up: LinearWeight | None
    output_up: Weight | None
    conv: torch.Tensor
    decay_bias: torch.Tensor
    decay_log: torch.Tensor
    norm: torch.Tensor

    def packed(self, pack: Callable[[Weight], Weight]) -> "KimiDelta":
        """The same, with projections as `pack` gives them."""
        changed = replace(self, mixed=pack(self.mixed), gates=pack_linear(self.gates))
        if self.forget_up is None or self.output_up is None:
            return changed
        return replace(changed, forget_up=pack_linear(self.forget_up), output_up=pack(self.output_up))

    def run(self, x: torch.Tensor, eps: float, metadata: StateMetadata, at: int) -> torch.Tensor:
        """Heads' outputs [T, N * D], before the output projection, for x [T, H]. at: the layer's place in its group."""
        shape, size = self.shape, self.shape.num_outputs
        mixed, output = linear(x, self.mixed).tensor_split((3 * size,), 1)
        corrects, forgets = linear(x, self.gates).tensor_split((shape.num_heads,), 1)
        if self.forget_up is not None and self.output_up is not None:
            forgets, output = linear(forgets.contiguous(), self.forget_up), linear(output.contiguous(), self.output_up)
        rule = ChannelRule(forgets, shape.least)
        inputs = DeltaInputs(mixed, corrects, self.conv, self.decay_bias, self.decay_log, channels=rule)
        out = run_rows(inputs, metadata, at, (shape.num_heads, shape.head_dim))
        return gated_norm(out, output, self.norm, eps, is_sigmoid=True)

    def destinations(self, whole: KimiDeltaShape, own: Part) -> Iterator[tuple[str, Destination]]:
        """See Mixer."""
        assert isinstance(self.mixed, LinearWeight), "weights are quantised when all are read"
        size, num_heads, own_size = whole.num_outputs, whole.num_heads, self.shape.num_outputs
        *mixed, output = self.mixed.data.tensor_split((own_size, 2 * own_size, 3 * own_size))
        corrects, forgets = self.gates.data.tensor_split((self.shape.num_heads,))
        parts = {"dt_bias": self.decay_bias, "f_proj.weight": forgets, "g_proj.weight": output}
        for name, part, taps in zip("qkv", mixed, self.conv[:, None].chunk(3), strict=True):
            parts |= {f"{name}_proj.weight": part, f"{name}_conv1d.weight": taps}
        if isinstance(self.output_up, LinearWeight) and self.forget_up is not None:
            yield "self_attn.f_a_proj.weight", take_all(parts.pop("f_proj.weight"))
            yield "self_attn.g_a_proj.weight", take_all(parts.pop("g_proj.weight"))
            parts |= {"f_b_proj.weight": self.forget_up.data, "g_b_proj.weight": self.output_up.data}
        yield from ((f"self_attn.{name}", take_kinds(part, (size,), own)) for name, part in parts.items())
        yield "self_attn.b_proj.weight", take_kinds(corrects, (num_heads,), own)
        if self.forget_up is None:
            yield "self_attn.A_log", take_kinds(self.decay_log, (num_heads,), own)
        else:
            log, heads = self.decay_log[None, None, :, None], slice(own(num_heads).start, own(num_heads).stop)
            yield "self_attn.A_log", Destination(log, (1, 1, num_heads, 1), places=((*ALL * 2, heads),))
        yield "self_attn.o_norm.weight", take_all(self.norm)


def allocate_kimi_delta(shape: KimiDeltaShape, hidden_size: int, empty: Empty) -> KimiDelta:
    """Empty weights of one layer."""
    size, rank, num_heads = shape.num_outputs, shape.gate_rank, shape.num_heads
    return KimiDelta(
        shape,
        mixed=LinearWeight(empty(3 * size + (rank or size), hidden_size)),
        gates=LinearWeight(empty(num_heads + (rank or size), hidden_size)),
        forget_up=LinearWeight(empty(size, rank)) if rank else None,
        output_up=LinearWeight(empty(size, rank)) if rank else None,
        conv=empty(3 * size, shape.kernel),
        decay_bias=empty(size).float(),
        decay_log=empty(num_heads).float(),
        norm=empty(shape.head_dim),
    )
