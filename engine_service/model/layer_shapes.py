"""What differs from layer to layer of a family beside windows: heads of K and V, layers that read the K and V of others, inputs
of a layer's own. Here config.json says it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .checkpoint.errors import UnsupportedModelError
from .checkpoint.json_file import bad, count, flag
from .families.family import Family
from .layer_groups import Heads

_PER_LAYER = "per_layer_config"


@dataclass(frozen=True, slots=True)
class LayerInputsConfig:
    """Each layer is given a vector of `size` numbers for each token, from an embedding of `vocab_size` rows."""

    vocab_size: int
    size: int


def parse_layer_heads(
    raw: Mapping[str, Any], family: Family, windows: Sequence[int | None], num_heads: int, heads: Heads
) -> tuple[Heads, ...]:
    """Heads of each layer; () where all have these. per_layer_config says it, or else it is by kind of layer."""
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
    for number, size in found:
        if num_heads % number or size % 2:
            raise bad("heads", f"of a layer must divide num_attention_heads {num_heads} and be even, are {number} of {size}")
    kinds = {(window is None, each) for window, each in zip(windows, found, strict=True)}
    if len(kinds) > len({is_full for is_full, _ in kinds}):
        raise UnsupportedModelError(_PER_LAYER, "other heads in layers of one kind", "the same in all layers of a kind")
    return () if set(found) == {heads} else found


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


def parse_kv_sources(raw: Mapping[str, Any], family: Family, windows: Sequence[int | None]) -> tuple[int, ...]:
    """Of the last num_kv_shared_layers layers, the layers whose K and V they read: the last of their kind that stores any."""
    num_sharing = raw.get("num_kv_shared_layers") or 0
    if not family.shares_kv or not num_sharing:
        return ()
    first = len(windows) - count(raw, "num_kv_shared_layers")
    last = {window: layer for layer, window in enumerate(windows[: max(first, 0)])}
    if missing := [layer for layer in range(max(first, 0), len(windows)) if windows[layer] not in last]:
        raise bad("num_kv_shared_layers", f"of {num_sharing} leaves no layer whose K and V layer {missing[0]} could read")
    return tuple(last[window] for window in windows[first:])


def parse_layer_inputs(raw: Mapping[str, Any], family: Family, vocab_size: int) -> LayerInputsConfig | None:
    """hidden_size_per_layer_input of 0 or null is none; an absent one the family's."""
    if family.layer_input is None or raw.get("hidden_size_per_layer_input", family.layer_input) in (0, None):
        return None
    rows = count(raw, "vocab_size_per_layer_input", max(vocab_size, 262_144))
    if rows < vocab_size:
        raise bad("vocab_size_per_layer_input", f"must be vocab_size {vocab_size} or more, is {rows}")
    return LayerInputsConfig(rows, count(raw, "hidden_size_per_layer_input", family.layer_input))
