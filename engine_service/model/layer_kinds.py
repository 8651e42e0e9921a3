"""What each layer is, which keys it sees and whether it rotates them, as config.json says it for a family."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from .checkpoint.errors import UnsupportedModelError
from .checkpoint.json_file import bad, count, flag
from .families.family import Family

LayerPart = Literal["attention", "recurrent", "mlp", "experts"]
MIXING: Final = ("attention", "recurrent")  # those in which tokens learn of others
_PARTS: Final[Mapping[str, LayerPart]] = {
    "*": "attention",
    "-": "mlp",
    "E": "experts",
    "M": "recurrent",
    "attention": "attention",
    "full_attention": "attention",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "mlp": "mlp",
    "moe": "experts",
}
_PART_LISTS: Final = ("layers_block_type", "layer_types", "hybrid_override_pattern")


def parse_parts(raw: Mapping[str, Any], family: Family) -> tuple[LayerPart, ...]:
    """What each layer has alone; () for a family whose layers have more. The first of three fields that is there says it."""
    if not family.has_single_parts:
        return ()
    key = next((key for key in _PART_LISTS if raw.get(key) is not None), _PART_LISTS[-1])
    said = raw.get(key)
    if not isinstance(said, list | str) or not said or any(not isinstance(each, str) for each in said):
        raise bad(key, "must name what each layer has")
    if unknown := [each for each in said if each not in _PARTS]:
        raise UnsupportedModelError("layer type", unknown[0], ", ".join(_PARTS))
    parts = tuple(_PARTS[each] for each in said)
    if not set(MIXING) <= set(parts):
        raise UnsupportedModelError(key, said, "models with layers of attention and recurrent ones")
    return parts


def parse_unrotated(raw: Mapping[str, Any], family: Family, num_layers: int) -> frozenset[int]:
    if not family.has_rope:
        return frozenset(range(num_layers))
    return _parse_still(raw, num_layers) if family.has_unrotated_layers else frozenset()


def _parse_still(raw: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """no_rope_layers has a 0 for each of them; by default it is every no_rope_layer_interval-th layer."""
    every, said = count(raw, "no_rope_layer_interval", 4), raw.get("no_rope_layers")
    said = said or [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(said, list) or len(said) < num_layers or any(each not in (0, 1) for each in said):
        raise bad("no_rope_layers", f"must be a list of {num_layers}, each 0 or 1")
    return frozenset(layer for layer in range(num_layers) if not said[layer])


def parse_chunks(raw: Mapping[str, Any], family: Family, unrotated: frozenset[int], num_layers: int) -> tuple[int | None, ...]:
    """A null attention_chunk_size is none; an absent one the family's."""
    if "attention_chunk_size" in raw and raw["attention_chunk_size"] is None:
        return ()
    size, kinds = count(raw, "attention_chunk_size", family.default_chunk), raw.get("layer_types")
    if kinds is None:
        return tuple(None if layer in unrotated else size for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise bad("layer_types", f"must be a list of {num_layers}")
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "chunked_attention")]:
        raise UnsupportedModelError("layer type", unknown[0], "full_attention, chunked_attention")
    return tuple(size if kind == "chunked_attention" else None for kind in kinds)


def parse_windows(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """A rule of the family (families/family.py) says which layers have one; a switched-off or null window is none."""
    if family.windows == "none" or raw.get("sliding_window", family.default_window) is None:
        return (None,) * num_layers
    if family.windows in ("switched", "switched_all") and not flag(raw, "use_sliding_window"):
        return (None,) * num_layers
    window = count(raw, "sliding_window", family.default_window)
    if family.windows in ("all", "switched_all"):
        return (window,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None and family.full_every is not None:
        every = count(raw, "sliding_window_pattern", family.full_every)
        kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise bad("max_window_layers", f"must be an integer, is {first!r}")
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise bad("layer_types", f"must be a list of {num_layers}")
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise UnsupportedModelError("layer type", unknown[0], "full_attention, sliding_attention")
    if family.ends_in_full:
        kinds = [*kinds[:-1], "full_attention"]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
