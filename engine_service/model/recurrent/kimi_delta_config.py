"""KimiDeltaShape: the shape of Kimi Delta Attention (arXiv 2510.26692), as its config.json says. Knows no tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..checkpoint.errors import UnsupportedModelError
from ..checkpoint.json_file import bad, count, flag
from ..families.family import KimiDeltaFamily
from .state_tensor import StateTensor

_INNER = "linear_attn_config"


@dataclass(frozen=True, slots=True)
class KimiDeltaShape:
    """Heads, each with a query, a key and a value of so many dimensions; tokens that the convolution reads.

    Attributes:
        gate_rank: numbers of a token that gates are projected by way of; 0: they are projected at once.
        least: of the logarithm of what a token leaves of a head's row; None: there is none.
    """

    num_heads: int
    head_dim: int
    kernel: int
    gate_rank: int
    least: float | None
    output: ClassVar = "self_attn.o_proj"  # the name of the projection behind it
    has_bias: ClassVar = False

    @property
    def split_counts(self) -> dict[str, int]:
        """What a number of ranks has to divide, by its name."""
        return {"heads of linear attention": self.num_heads}

    def of_rank(self, num_ranks: int) -> "KimiDeltaShape":
        """The shape of each of so many ranks."""
        return replace(self, num_heads=self.num_heads // num_ranks)

    @property
    def num_outputs(self) -> int:
        """Numbers of a token that the output projection takes; as many are queries, keys, values, and gates of either kind."""
        return self.num_heads * self.head_dim

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """A matrix for each head, and the convolution's last inputs."""
        matrices = StateTensor((self.num_heads, self.head_dim, self.head_dim), is_wide=True)
        return matrices, StateTensor((self.kernel - 1, 3 * self.num_outputs))


def parse_kimi_delta(raw: Mapping[str, Any], family: KimiDeltaFamily) -> KimiDeltaShape:
    """What linear_attn_config says counts before what is beside it. Raises ModelConfigError, UnsupportedModelError."""
    names, own = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"), dict(raw)
    if family.has_heads_of_attention:
        own = {"linear_head_dim": raw.get("head_dim"), "linear_num_heads": raw["num_attention_heads"]} | own
    for inner, name in zip(("head_dim", "num_heads", "short_conv_kernel_size"), names, strict=True):
        own[name] = _parse_inner(raw).get(inner, own.get(name))
    for name, only in family.only.items():
        if (said := raw.get(name)) not in (None, only):
            raise UnsupportedModelError(name, said, repr(only))
    head_dim, kernel = count(own, "linear_head_dim", family.head_dim), count(own, "linear_conv_kernel_dim", family.kernel)
    if kernel < 2:
        raise bad("linear_conv_kernel_dim", f"must be 2 or more, is {kernel}")
    rank = head_dim if family.has_gate_rank else 0
    return KimiDeltaShape(count(own, "linear_num_heads", family.heads), head_dim, kernel, rank, _parse_least(raw, family))


def list_kimi_layers(raw: Mapping[str, Any], num_layers: int) -> Any:
    """layer_types, or else as full_attn_layers of linear_attn_config says, which counts from 1; None where neither is there."""
    full = _parse_inner(raw).get("full_attn_layers")
    if raw.get("layer_types") is not None or full is None:
        return raw.get("layer_types")
    if not isinstance(full, list) or not all(type(layer) is int and 0 < layer <= num_layers for layer in full):
        raise bad(f"{_INNER}.full_attn_layers", f"must be a list of layers from 1 to {num_layers}, is {full!r}")
    return ["full_attention" if layer in full else "linear_attention" for layer in range(1, num_layers + 1)]


def _parse_inner(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = raw.get(_INNER) or {}
    if not isinstance(inner, Mapping):
        raise bad(_INNER, "must be an object")
    return inner


def _parse_least(raw: Mapping[str, Any], family: KimiDeltaFamily) -> float | None:
    if family.least is None or (raw.get("kda_safe_gate") is not None and not flag(raw, "kda_safe_gate")):
        return None
    least = raw.get("kda_lower_bound", family.least)
    if not isinstance(least, int | float) or isinstance(least, bool) or not -80.0 <= least < 0:
        raise bad("kda_lower_bound", f"must be a number from -80 to below 0, is {least!r}")
    return float(least)
