"""RopeConfig: rotary embeddings as a config.json describes them, in the styles of transformers 4 and 5."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from .checkpoint.errors import UnsupportedModelError
from .checkpoint.json_file import bad, count, flag, number
from .families.family import Family

_ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")
_BETAS: Final = {"beta_fast": 32.0, "beta_slow": 1.0}
_PART: Final = "partial_rotary_factor"
_ORIGINAL: Final = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, and how its frequencies are scaled.

    `kind` is default, linear, llama3, yarn, longrope or proportional. A dynamic one is a default one up to the model's length,
    and the engine goes no farther. `factor` belongs to linear, llama3, yarn and proportional, original_max_position to llama3,
    yarn and longrope, the two about low and high to llama3, magnitude to yarn and longrope, `divisors` to longrope, and the
    rest to yarn; `part` to all.

    Attributes:
        beta_fast, beta_slow: turns within the original length, above and below which a frequency is kept or divided.
        is_truncated: the frequencies between are bounded by whole numbers.
        magnitude: factor of cosines and sines.
        score_magnitude: factor of queries and of keys whose rotated part alone has `magnitude`; latent attention has it.
        part: the share of each head that is rotated, its first dimensions; with proportional the first pairs of all of its
            dimensions, which have the frequencies that they have where all of them turn.
        divisors: of each frequency, up to the original length. Beyond it longrope would rotate all keys of a sequence anew, by
            others: then no prefix could be shared, so the engine goes no farther.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    magnitude: float = 1.0
    score_magnitude: float = 1.0
    part: float = 1.0
    divisors: tuple[float, ...] = ()

    @property
    def max_position(self) -> int:
        """Up to which it is meant to be used, where it says so; else 0."""
        return int(self.factor * self.original_max_position) if self.kind == "yarn" else 0

    def rotated_dim(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated, by nothing where the rope is proportional."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.part)


def parse_rope(raw: Mapping[str, Any], max_position: int, family: Family) -> RopeConfig:
    """The rope of the layers without a window, or of all."""
    theta = raw.get("rope_theta", family.default_theta)
    parameters = raw.get("rope_parameters")
    if parameters is None:
        scaling = raw.get("rope_scaling")
        parameters = scaling if isinstance(scaling, dict) else dict(family.default_rope or {})
    if not isinstance(parameters, dict):
        raise bad("rope_parameters", "must be an object")
    if isinstance(parameters.get("full_attention"), dict):
        parameters = parameters["full_attention"]
    elif raw.get(_ORIGINAL) is not None:  # it has the last word, as in transformers
        parameters = {**parameters, _ORIGINAL: raw[_ORIGINAL]}
    parameters = {"rope_theta": theta, _PART: family.default_part, **parameters}
    if family.latent is not None:  # what is rotated is qk_rope_head_dim, whatever part of another size that is
        raw, parameters = ({name: said for name, said in each.items() if name != _PART} for each in (raw, parameters))
    return _parse(raw, parameters, max_position, may_be_part=family.has_partial_rope)


def parse_local_rope(raw: Mapping[str, Any], max_position: int, default_theta: float | None) -> RopeConfig | None:
    """The rope of the layers with a window, where the family gives them their own."""
    if default_theta is None:
        return None
    theta = raw.get("rope_local_base_freq", default_theta)
    by_kind = raw.get("rope_parameters")
    local = by_kind.get("sliding_attention") if isinstance(by_kind, dict) else None
    return _parse(raw, {"rope_theta": theta, **(local if isinstance(local, dict) else {})}, max_position)


def _parse(
    raw: Mapping[str, Any], parameters: Mapping[str, Any], max_position: int, *, may_be_part: bool = False
) -> RopeConfig:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("su", "yarn") and parameters.get("short_factor") is not None:
        kind = "longrope"  # its names in the first releases of Phi-3
    if kind == "mrope":  # text has one position in all of its sections
        kind = "default"
    if kind not in _ROPE_KINDS:
        raise UnsupportedModelError("rope type", kind, ", ".join(_ROPE_KINDS))
    part = raw.get(_PART, parameters.get(_PART, 1.0))
    if part != 1.0 and kind != "proportional" and not (may_be_part and kind in ("default", "longrope")):
        raise UnsupportedModelError(_PART, part, "1.0")
    if not isinstance(part, int | float) or not 0 < part <= 1:
        raise bad(_PART, f"must be above 0 and at most 1, is {part!r}")
    theta = number(parameters, "rope_theta")
    score_magnitude = 1.0
    if kind != "default" and parameters.get("mscale_all_dim"):
        score_magnitude = _magnitude(number(parameters, "factor"), number(parameters, "mscale_all_dim"))
    return replace(_parse_kind(kind, parameters, theta, max_position), part=part, score_magnitude=score_magnitude)


def _parse_kind(kind: str, parameters: Mapping[str, Any], theta: float, max_position: int) -> RopeConfig:
    if kind in ("default", "dynamic"):
        return RopeConfig(theta)
    if kind == "longrope":
        return _parse_longrope(parameters, theta, max_position)
    if kind == "yarn":
        return _parse_yarn(parameters, theta, max_position)
    if kind == "proportional":
        return RopeConfig(theta, kind, number(parameters, "factor", 1.0))
    factor = number(parameters, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
    if high <= low:
        raise bad("high_freq_factor", f"must exceed low_freq_factor {low}, is {high}")
    original = count(parameters, _ORIGINAL, max_position)
    return RopeConfig(theta, kind, factor, low, high, original)


def _parse_longrope(parameters: Mapping[str, Any], theta: float, max_position: int) -> RopeConfig:
    """LongRoPE (arXiv 2402.13753). Without a factor it is the ratio of the lengths, as in transformers."""
    original = count(parameters, _ORIGINAL)
    divisors = parameters.get("short_factor")
    if not isinstance(divisors, list) or not all(isinstance(each, int | float) and each > 0 for each in divisors):
        raise bad("short_factor", "must be a list of positive numbers")
    factor = number(parameters, "factor") if parameters.get("factor") is not None else max_position / original
    if parameters.get("attention_factor") is not None:
        magnitude = number(parameters, "attention_factor")
    else:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        theta,
        "longrope",
        original_max_position=original,
        magnitude=magnitude,
        divisors=tuple(float(each) for each in divisors),
    )


def _parse_yarn(parameters: Mapping[str, Any], theta: float, max_position: int) -> RopeConfig:
    """Without a factor it is the ratio of the lengths, as in transformers."""
    original = count(parameters, _ORIGINAL, max_position)
    factor = number(parameters, "factor") if parameters.get("factor") is not None else max_position / original
    if parameters.get("attention_factor") is not None:
        magnitude = number(parameters, "attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        magnitude = _magnitude(factor, number(parameters, "mscale")) / _magnitude(factor, number(parameters, "mscale_all_dim"))
    else:
        magnitude = _magnitude(factor, 1.0)
    fast, slow = (number(parameters, key) if parameters.get(key) else value for key, value in _BETAS.items())
    is_truncated = parameters.get("truncate") is None or flag(parameters, "truncate")
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        is_truncated=is_truncated,
        magnitude=magnitude,
    )


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
