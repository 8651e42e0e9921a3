"""ShortConv: a gated convolution over a few tokens as a mixer, as LFM2 has it.

One projection gives three numbers of each channel: what goes into the convolution is the first times the third, and what comes
out of it is multiplied by the second.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvkeeper.kernels.activations.linear import linear
from kvkeeper.kernels.recurrent.short_conv import short_conv
from kvkeeper.kernels.types import ConvInputs, LinearWeight

from ..checkpoint.destination import Destination, Empty, Part, take_kinds
from ..experts import Weight
from .short_conv_config import ShortConvShape
from .state_pages import StateMetadata


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A Mixer. mixed: [3 C, H], of C channels and H hidden. conv: [C, kernel]. bias: [C], of the convolution, or None."""

    mixed: Weight
    conv: torch.Tensor
    bias: torch.Tensor | None

    def packed(self, pack: Callable[[Weight], Weight]) -> "ShortConv":
        """The same, with projections as `pack` gives them."""
        return replace(self, mixed=pack(self.mixed))

    def run(self, x: torch.Tensor, eps: float, metadata: StateMetadata, at: int) -> torch.Tensor:
        """What the convolution gives [T, C], before the output projection, for x [T, H]."""
        inputs, (window,) = ConvInputs(linear(x, self.mixed), self.conv, self.bias), metadata.layers[at]
        out = inputs.mixed.new_empty(len(x), len(self.conv))
        for rows in (metadata.rows, metadata.chunks):
            if rows is not None:
                short_conv(inputs, window, rows, out)
        return out

    def destinations(self, whole: ShortConvShape, own: Part) -> Iterator[tuple[str, Destination]]:
        """See Mixer."""
        assert isinstance(self.mixed, LinearWeight), "weights are quantised when all are read"
        channels = (whole.channels,)
        yield "conv.in_proj.weight", take_kinds(self.mixed.data, 3 * channels, own)
        yield "conv.conv.weight", take_kinds(self.conv[:, None], channels, own)
        if self.mixed.bias is not None and self.bias is not None:
            yield "conv.in_proj.bias", take_kinds(self.mixed.bias, 3 * channels, own)
            yield "conv.conv.bias", take_kinds(self.bias, channels, own)


def allocate_short_conv(shape: ShortConvShape, hidden_size: int, empty: Empty) -> ShortConv:
    """Empty weights of one layer."""
    channels, has_bias = shape.channels, shape.has_bias
    mixed = LinearWeight(empty(3 * channels, hidden_size), empty(3 * channels) if has_bias else None)
    return ShortConv(mixed, empty(channels, shape.kernel), empty(channels) if has_bias else None)
