"""RecurrentConfig: which layers of a model keep a state instead of K and V, and of what shape, as its config.json says.

A kind of layer declares its state by the tensors that it consists of; what handles states knows no kind. Knows no tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..checkpoint.errors import UnsupportedModelError
from ..checkpoint.json_file import bad, count
from ..families.family import ConvFamily, KimiDeltaFamily, RecurrentFamily, ScanFamily
from .delta_config import DeltaNetShape, parse_delta_net
from .kimi_delta_config import KimiDeltaShape, list_kimi_layers, parse_kimi_delta
from .scan_config import ScanShape, parse_scan
from .short_conv_config import ShortConvShape, parse_short_conv
from .state_tensor import StateTensor

_ALIGNMENT = 16  # bytes; of each layer's state in a page
RecurrentShape = DeltaNetShape | KimiDeltaShape | ScanShape | ShortConvShape


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """The layers that keep a state, all of one shape."""

    layers: frozenset[int]
    shape: RecurrentShape


def state_bytes(tensors: Sequence[StateTensor], itemsize: int) -> int:
    """The bytes of a layer's state, to the next multiple of 16, in a model whose numbers have `itemsize` bytes."""
    size = sum(prod(tensor.shape) * (4 if tensor.is_wide else itemsize) for tensor in tensors)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def parse_recurrent(
    raw: Mapping[str, Any], family: RecurrentFamily, num_layers: int, parts: Sequence[str] = ()
) -> RecurrentConfig:
    """parts: see ModelConfig. Raises ModelConfigError, UnsupportedModelError."""
    if isinstance(family, ScanFamily):
        layers = (layer for layer, part in enumerate(parts) if part == "recurrent")
        return RecurrentConfig(frozenset(layers), parse_scan(raw, family))
    shape: RecurrentShape
    if isinstance(family, ConvFamily):
        shape, kinds = parse_short_conv(raw, family), _kinds_by_number(raw, num_layers)
    elif isinstance(family, KimiDeltaFamily):
        shape, kinds = parse_kimi_delta(raw, family), list_kimi_layers(raw, num_layers)
        kinds = _kinds_in_turn(raw, family.full_every, num_layers) if kinds is None else kinds
    else:
        shape, kinds = parse_delta_net(raw, family), _kinds_in_turn(raw, family.full_every, num_layers)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise bad("layer_types", f"must be a list of {num_layers}")
    if unknown := [kind for kind in kinds if kind not in ("full_attention", family.layer_type)]:
        raise UnsupportedModelError("layer type", unknown[0], f"full_attention, {family.layer_type}")
    if "full_attention" not in kinds:
        raise UnsupportedModelError(
            "layer_types", f"{family.layer_type} in all layers", "models with a layer of full attention"
        )
    return RecurrentConfig(frozenset(layer for layer, kind in enumerate(kinds) if kind == family.layer_type), shape)


def _kinds_in_turn(raw: Mapping[str, Any], full_every: int, num_layers: int) -> Any:
    """layer_types, or else by full_attention_interval."""
    if raw.get("layer_types") is not None:
        return raw["layer_types"]
    every = count(raw, "full_attention_interval", full_every)
    return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]


def _kinds_by_number(raw: Mapping[str, Any], num_layers: int) -> Any:
    """layer_types, or else by full_attn_idxs, the numbers of the layers of attention; without those all are."""
    if raw.get("layer_types") is not None:
        return raw["layer_types"]
    full = raw.get("full_attn_idxs")
    full = list(range(num_layers)) if full is None else full
    if not isinstance(full, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in full):
        raise bad("full_attn_idxs", f"must be a list of layers below {num_layers}, is {full!r}")
    return ["full_attention" if layer in full else "conv" for layer in range(num_layers)]
