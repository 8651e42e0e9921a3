"""ShortConvShape: the shape of a layer that convolves a few tokens, as its config.json says. Knows no tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..checkpoint.json_file import bad, count, flag
from ..families.family import ConvFamily
from .state_tensor import StateTensor


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """Channels, as many as the hidden size; tokens that the convolution reads; whether it and its projections have biases."""

    channels: int
    kernel: int
    has_bias: bool
    output: ClassVar = "conv.out_proj"  # the name of the projection behind it

    @property
    def split_counts(self) -> dict[str, int]:
        """What a number of ranks has to divide, by its name."""
        return {"channels of its convolutions": self.channels}

    def of_rank(self, num_ranks: int) -> "ShortConvShape":
        """The shape of each of so many ranks."""
        return replace(self, channels=self.channels // num_ranks)

    @property
    def num_outputs(self) -> int:
        """Numbers of a token that the output projection takes."""
        return self.channels

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The convolution's last inputs."""
        return (StateTensor((self.kernel - 1, self.channels)),)


def parse_short_conv(raw: Mapping[str, Any], family: ConvFamily) -> ShortConvShape:
    """Raises ModelConfigError."""
    kernel = count(raw, "conv_L_cache", family.kernel)
    if kernel < 2:
        raise bad("conv_L_cache", f"must be 2 or more, is {kernel}")
    return ShortConvShape(count(raw, "hidden_size"), kernel, flag(raw, "conv_bias"))
