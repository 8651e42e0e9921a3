"""DeltaConfig: which layers of a model are gated delta nets, and of what shape, as its config.json says. Knows no tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint.errors import UnsupportedModelError
from ..checkpoint.json_file import bad, count
from ..families.family import DeltaFamily

_ALIGNMENT = 16  # bytes; of each layer's state in a page


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """Heads of keys (and queries) and of values, each with so many dimensions; tokens that the convolution reads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def conv_dim(self) -> int:
        """Numbers of a token that are convolved: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def memory_bytes(self) -> int:
        """The bytes of one layer's matrices, one for each value head, in float32."""
        return 4 * self.num_value_heads * self.key_dim * self.value_dim

    def state_bytes(self, itemsize: int) -> int:
        """The bytes of one layer's state, to the next multiple of 16.

        The state consists of the matrices and of the convolution's last inputs of `itemsize` bytes each.
        """
        conv_bytes = self.conv_dim * (self.kernel - 1) * itemsize
        return -(-(self.memory_bytes + conv_bytes) // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The layers that are gated delta nets, all of one shape; the others are attention."""

    layers: frozenset[int]
    shape: DeltaNetShape


def parse_delta(raw: Mapping[str, Any], family: DeltaFamily, num_layers: int) -> DeltaConfig:
    """Raises ModelConfigError, UnsupportedModelError."""
    shape = DeltaNetShape(
        count(raw, "linear_num_key_heads", family.key_heads),
        count(raw, "linear_num_value_heads", family.value_heads),
        count(raw, "linear_key_head_dim", family.key_dim),
        count(raw, "linear_value_head_dim", family.value_dim),
        count(raw, "linear_conv_kernel_dim", family.kernel),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise bad("linear_num_key_heads", f"{shape.num_key_heads} does not divide {shape.num_value_heads} heads of values")
    if shape.kernel < 2:
        raise bad("linear_conv_kernel_dim", f"must be 2 or more, is {shape.kernel}")
    kinds = raw.get("layer_types")
    if kinds is None:
        every = count(raw, "full_attention_interval", family.full_every)
        kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise bad("layer_types", f"must be a list of {num_layers}")
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "linear_attention")]:
        raise UnsupportedModelError("layer type", unknown[0], "full_attention, linear_attention")
    if "full_attention" not in kinds:
        raise UnsupportedModelError("layer_types", "linear_attention in all layers", "models with a layer of full attention")
    return DeltaConfig(frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"), shape)
