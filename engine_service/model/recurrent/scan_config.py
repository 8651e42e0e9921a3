"""ScanShape: the shape of a Mamba 2 layer (arXiv 2405.21060), as its config.json says. Knows no tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar

from ..checkpoint.errors import UnsupportedModelError
from ..checkpoint.json_file import bad, count, flag
from ..families.family import ScanFamily
from .state_tensor import StateTensor


@dataclass(frozen=True, slots=True)
class ScanShape:
    """Heads, each of so many dimensions; groups of them that have a key (B) and a query (C) of `state_size` numbers together.

    Attributes:
        kernel: tokens that the convolution reads.
        least, most: bounds of a token's step.
        has_conv_bias, has_bias: of the convolution, and of the projections.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    least: float
    most: float
    has_conv_bias: bool
    has_bias: bool
    output: ClassVar = "mixer.out_proj"  # the name of the projection behind it

    @property
    def split_counts(self) -> dict[str, int]:
        """What a number of ranks has to divide, by its name."""
        return {"groups of its scans": self.num_groups}

    def of_rank(self, num_ranks: int) -> "ScanShape":
        """The shape of each of so many ranks. A group is with all heads that it goes with."""
        return replace(self, num_heads=self.num_heads // num_ranks, num_groups=self.num_groups // num_ranks)

    @property
    def conv_dim(self) -> int:
        """Numbers of a token that are convolved: queries, keys and values."""
        return 2 * self.num_groups * self.state_size + self.num_outputs

    @property
    def num_outputs(self) -> int:
        """Numbers of a token that the output projection takes."""
        return self.num_heads * self.head_dim

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """A matrix for each head, and the convolution's last inputs."""
        matrices = StateTensor((self.num_heads, self.state_size, self.head_dim), is_wide=True)
        return matrices, StateTensor((self.kernel - 1, self.conv_dim))


def parse_scan(raw: Mapping[str, Any], family: ScanFamily) -> ScanShape:
    """Raises ModelConfigError, UnsupportedModelError."""
    if (activation := raw.get("mamba_hidden_act")) not in (None, "silu"):
        raise UnsupportedModelError("mamba_hidden_act", activation, "silu")
    num_heads, num_groups = count(raw, "mamba_num_heads", family.heads), count(raw, "n_groups", family.groups)
    if num_heads % num_groups:
        raise bad("n_groups", f"{num_groups} does not divide mamba_num_heads {num_heads}")
    kernel = count(raw, "conv_kernel", family.kernel)
    if kernel < 2:
        raise bad("conv_kernel", f"must be 2 or more, is {kernel}")
    return ScanShape(
        num_heads,
        count(raw, "mamba_head_dim", family.head_dim),
        num_groups,
        count(raw, "ssm_state_size", family.state_size),
        kernel,
        *_parse_bounds(raw),
        has_conv_bias=raw.get("use_conv_bias") is None or flag(raw, "use_conv_bias"),
        has_bias=flag(raw, "use_bias"),
    )


def _parse_bounds(raw: Mapping[str, Any]) -> tuple[float, float]:
    """time_step_limit, as the kernels that the models were trained and released with take it; without it there are none.

    transformers puts time_step_min in the place of its first number, and its one-token step bounds nothing. That field is of
    how weights were drawn, and taken as a bound it makes states forget that were trained to last.
    """
    said = raw.get("time_step_limit")
    said = (0.0, inf) if said is None else said
    are_two = isinstance(said, list | tuple) and len(said) == 2
    if not are_two or any(isinstance(each, bool) or not isinstance(each, int | float) for each in said):
        raise bad("time_step_limit", f"must be two numbers, is {said!r}")
    if not 0 <= said[0] < said[1]:
        raise bad("time_step_limit", f"must be 0 or more, and then more, is {said!r}")
    return float(said[0]), float(said[1])
