"""RopeConfig: rotary embeddings as a config.json describes them, in the styles of transformers 4 and 5."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine_service.errors import UnsupportedModelError
from engine_service.model.json_fields import bad, count, number

_ROPE_KINDS: Final = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, and how its frequencies are scaled.

    `kind` is default, linear or llama3. `factor` belongs to the last two, the rest to llama3 alone.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def parse_rope(raw: Mapping[str, Any], max_position: int, default_theta: float) -> RopeConfig:
    """Of the layers without a window, or of all."""
    theta = raw.get("rope_theta", default_theta)
    parameters = raw.get("rope_parameters")
    if parameters is None:
        scaling = raw.get("rope_scaling")
        parameters = scaling if isinstance(scaling, dict) else {}
    if not isinstance(parameters, dict):
        raise bad("rope_parameters", "must be an object")
    if isinstance(parameters.get("full_attention"), dict):
        parameters = parameters["full_attention"]
    return _parse(raw, {"rope_theta": theta, **parameters}, max_position)


def parse_local_rope(raw: Mapping[str, Any], max_position: int, default_theta: float | None) -> RopeConfig | None:
    """Of the layers with a window, where the family gives them their own."""
    if default_theta is None:
        return None
    theta = raw.get("rope_local_base_freq", default_theta)
    by_kind = raw.get("rope_parameters")
    local = by_kind.get("sliding_attention") if isinstance(by_kind, dict) else None
    return _parse(raw, {"rope_theta": theta, **(local if isinstance(local, dict) else {})}, max_position)


def _parse(raw: Mapping[str, Any], parameters: Mapping[str, Any], max_position: int) -> RopeConfig:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise UnsupportedModelError("rope type", kind, ", ".join(_ROPE_KINDS))
    if (part := raw.get("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0))) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor", part, "1.0")
    theta = number(parameters, "rope_theta")
    if kind == "default":
        return RopeConfig(theta)
    factor = number(parameters, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
    if high <= low:
        raise bad("high_freq_factor", f"must exceed low_freq_factor {low}, is {high}")
    original = count(parameters, "original_max_position_embeddings", max_position)
    return RopeConfig(theta, kind, factor, low, high, original)
