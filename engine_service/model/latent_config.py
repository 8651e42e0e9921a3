"""LatentConfig: the widths of latent attention, as config.json says them for a family. Knows no tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvkeeper.kernels.attention.latent_widths import LatentWidths

from .checkpoint.json_file import bad, count, flag
from .families.family import LatentFamily
from .rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention. query_rank: None: queries are projected at once. are_sides: rotated pairs are stored side by side.

    has_head_gates: what each head attends to is weighed by a sigmoid of its own.
    """

    widths: LatentWidths
    query_rank: int | None
    are_sides: bool
    scale: float
    has_head_gates: bool = False


def parse_latent(raw: Mapping[str, Any], family: LatentFamily, rope: RopeConfig, default_value: int) -> LatentConfig:
    """A null q_lora_rank is none; an absent one the family's."""
    widths = LatentWidths(
        count(raw, "kv_lora_rank", family.latent),
        count(raw, "qk_rope_head_dim", family.rope),
        count(raw, "qk_nope_head_dim", family.key),
        count(raw, "v_head_dim", family.value or default_value),
    )
    if widths.rope % 2:
        raise bad("qk_rope_head_dim", f"must be even, is {widths.rope}")
    has_rank = raw.get("q_lora_rank", family.query_rank) is not None
    are_sides = family.pairs == "sides"
    if family.pairs == "switched":
        are_sides = raw.get("rope_interleave") is None or flag(raw, "rope_interleave")
    scale = (widths.key + widths.rope) ** -0.5 * rope.score_magnitude**2
    rank = count(raw, "q_lora_rank", family.query_rank) if has_rank else None
    return LatentConfig(widths, rank, are_sides, scale, family.has_head_gates)
