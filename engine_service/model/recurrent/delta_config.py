"""DeltaNetShape: the shape of a gated delta net, as its config.json says. Knows no tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..checkpoint.json_file import bad, count
from ..families.family import DeltaFamily
from .state_tensor import StateTensor


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """Heads of keys (and queries) and of values, each with so many dimensions; tokens that the convolution reads.

    is_mixed: what a layer projects is stored key head by key head, each with all kinds; otherwise kind by kind.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_mixed: bool = True
    output: ClassVar = "linear_attn.out_proj"  # the name of the projection behind it
    has_bias: ClassVar = False

    @property
    def split_counts(self) -> dict[str, int]:
        """What a number of ranks has to divide, by its name."""
        return {"key heads of linear attention": self.num_key_heads}

    def of_rank(self, num_ranks: int) -> "DeltaNetShape":
        """The shape of each of so many ranks. A head of keys is with all heads of values that it goes with."""
        return replace(self, num_key_heads=self.num_key_heads // num_ranks, num_value_heads=self.num_value_heads // num_ranks)

    @property
    def conv_sizes(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values, in that order."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_outputs

    @property
    def conv_dim(self) -> int:
        """Numbers of a token that are convolved: queries, keys and values."""
        return sum(self.conv_sizes)

    @property
    def num_outputs(self) -> int:
        """Numbers of a token that the output projection takes."""
        return self.num_value_heads * self.value_dim

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """A matrix for each value head, and the convolution's last inputs."""
        matrices = StateTensor((self.num_value_heads, self.key_dim, self.value_dim), is_wide=True)
        return matrices, StateTensor((self.kernel - 1, self.conv_dim))


def parse_delta_net(raw: Mapping[str, Any], family: DeltaFamily) -> DeltaNetShape:
    """Raises ModelConfigError."""
    shape = DeltaNetShape(
        count(raw, "linear_num_key_heads", family.key_heads),
        count(raw, "linear_num_value_heads", family.value_heads),
        count(raw, "linear_key_head_dim", family.key_dim),
        count(raw, "linear_value_head_dim", family.value_dim),
        count(raw, "linear_conv_kernel_dim", family.kernel),
        family.is_mixed,
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise bad("linear_num_key_heads", f"{shape.num_key_heads} does not divide {shape.num_value_heads} heads of values")
    if shape.kernel < 2:
        raise bad("linear_conv_kernel_dim", f"must be 2 or more, is {shape.kernel}")
    return shape
