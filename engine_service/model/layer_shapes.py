"""Sizes of layers, and what differs from layer to layer of a family beside windows: heads of K and V, layers that read the K
and V of others, inputs of a layer's own. Here config.json says it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .checkpoint.errors import UnsupportedModelError
from .checkpoint.json_file import bad, count, flag, number
from .families.family import Family
from .layer_groups import Heads

_PER_LAYER = "per_layer_config"


@dataclass(frozen=True, slots=True)
class LayerInputsConfig:
    """Each layer is given a vector of `size` numbers for each token, from an embedding of `vocab_size` rows."""

    vocab_size: int
    size: int


def parse_width(raw: Mapping[str, Any], family: Family) -> int:
    """Inner width of an MLP; where it is adjusted, two thirds of it by a factor, up to the next multiple."""
    width = count(raw, family.mlp_width)
    if not family.adjusts_width or not (raw.get("block_auto_adjust_ff_dim") is None or flag(raw, "block_auto_adjust_ff_dim")):
        return width
    width = 2 * width // 3
    if raw.get("block_ffn_dim_multiplier", 1.0) is None:
        return width
    width, multiple = int(number(raw, "block_ffn_dim_multiplier", 1.0) * width), count(raw, "block_multiple_of", 256)
    return -(-width // multiple) * multiple


def parse_layers(
    raw: Mapping[str, Any], family: Family, windows: Sequence[int | None], num_heads: int, heads: Heads
) -> dict[str, Any]:
    """What the layers have, by its names in ModelConfig. heads: of K and V, of the layers of which nothing else is said."""
    layer_heads = _parse_heads(raw, family, windows, num_heads, heads)
    if len(set(layer_heads)) == 1:
        heads, layer_heads = layer_heads[0], ()
    has_equal_kv = family.full_head_dim is not None and flag(raw, "attention_k_eq_v")
    return {
        "num_kv_heads": heads[0],
        "head_dim": heads[1],
        "layer_heads": layer_heads,
        "kv_sources": _parse_kv_sources(raw, family, windows),
        "keys_as_values": frozenset(layer for layer, window in enumerate(windows) if has_equal_kv and window is None),
        "has_value_norm": family.has_value_norm,
        "has_wide_sharers": family.shares_kv and flag(raw, "use_double_wide_mlp"),
        "layer_inputs": _parse_inputs(raw, family),
        "has_layer_scales": family.has_layer_scales,
    }


def _parse_heads(
    raw: Mapping[str, Any], family: Family, windows: Sequence[int | None], num_heads: int, heads: Heads
) -> tuple[Heads, ...]:
    """Heads of each layer; () where the family has these in all. per_layer_config says it, or else it is by kind of layer."""
    if family.full_head_dim is None:
        return ()
    if raw.get(_PER_LAYER) is not None:
        found = _by_layer(raw[_PER_LAYER], len(windows), heads)
    else:
        full_heads = raw.get("num_global_key_value_heads") if flag(raw, "attention_k_eq_v") else None
        full = (
            heads[0] if full_heads is None else count(raw, "num_global_key_value_heads"),
            count(raw, "global_head_dim", family.full_head_dim),
        )
        found = tuple(heads if window else full for window in windows)
    for num_kv_heads, size in found:
        if num_heads % num_kv_heads or size % 2:
            raise bad(
                "heads", f"of a layer must divide num_attention_heads {num_heads} and be even, are {num_kv_heads} of {size}"
            )
    kinds = {(window is None, each) for window, each in zip(windows, found, strict=True)}
    if len(kinds) > len({is_full for is_full, _ in kinds}):
        raise UnsupportedModelError(_PER_LAYER, "other heads in layers of one kind", "the same in all layers of a kind")
    return found


def _by_layer(said: object, num_layers: int, heads: Heads) -> tuple[Heads, ...]:
    found = dict.fromkeys(range(num_layers), heads)
    if not isinstance(said, dict):
        raise bad(_PER_LAYER, "must be an object")
    for key, fields in said.items():
        if not (key.isdecimal() and int(key) < num_layers and isinstance(fields, dict)):
            raise bad(_PER_LAYER, f"must have objects of layers below {num_layers}, has {key!r}")
        if unknown := set(fields) - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModelError(_PER_LAYER, min(unknown), "head_dim, num_key_value_heads")
        found[int(key)] = count(fields, "num_key_value_heads", heads[0]), count(fields, "head_dim", heads[1])
    return tuple(found.values())


def _parse_kv_sources(raw: Mapping[str, Any], family: Family, windows: Sequence[int | None]) -> tuple[int, ...]:
    """The layers whose K and V the last num_kv_shared_layers layers read: the last of the kind of each that stores any."""
    num_sharing = raw.get("num_kv_shared_layers") or 0
    if not family.shares_kv or not num_sharing:
        return ()
    first = len(windows) - count(raw, "num_kv_shared_layers")
    last = {window: layer for layer, window in enumerate(windows[: max(first, 0)])}
    if missing := [layer for layer in range(max(first, 0), len(windows)) if windows[layer] not in last]:
        raise bad("num_kv_shared_layers", f"of {num_sharing} leaves no layer whose K and V layer {missing[0]} could read")
    return tuple(last[window] for window in windows[first:])


def _parse_inputs(raw: Mapping[str, Any], family: Family) -> LayerInputsConfig | None:
    """hidden_size_per_layer_input of 0 or null is none; an absent one the family's."""
    if family.layer_input is None or raw.get("hidden_size_per_layer_input", family.layer_input) in (0, None):
        return None
    vocab_size = count(raw, "vocab_size")
    rows = count(raw, "vocab_size_per_layer_input", max(vocab_size, 262_144))
    if rows < vocab_size:
        raise bad("vocab_size_per_layer_input", f"must be vocab_size {vocab_size} or more, is {rows}")
    return LayerInputsConfig(rows, count(raw, "hidden_size_per_layer_input", family.layer_input))
