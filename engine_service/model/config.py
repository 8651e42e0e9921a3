"""ModelConfig: one frozen value with all that the decoder needs to know, read from a Hugging Face config.json.

Families differ only in the data here: biases, norms on queries and keys, where their windows are. Both config styles
are read: rope_theta with rope_scaling (transformers 4) and rope_parameters (transformers 5). What is not built is
refused with a typed error, never approximated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine_service.errors import ModelConfigError, UnsupportedModelError
from engine_service.model.json_file import read_json_object

CONFIG_FILE: Final = "config.json"


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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder is parameterised by.

    Attributes:
        windows: per layer, the keys visible to a query, itself included; None: all.
        weights_dtype: name of the dtype that config.json states for the weights, or None.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    weights_dtype: str | None

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return self.head_dim**-0.5


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family differs from Llama. None for a bias: config.json's attention_bias says (default: none)."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None  # default where config.json has none; None: hidden_size / num_heads
    default_window: int | None = None


_FAMILIES: Final[Mapping[str, _Family]] = {
    "llama": _Family(),
    "mistral": _Family(qkv_bias=False, o_bias=False, default_window=4096),
    "qwen2": _Family(qkv_bias=True, o_bias=False, default_window=4096),
    "qwen3": _Family(qk_norm=True, head_dim=128, default_window=4096),
}
_ROPE_KINDS: Final = ("default", "linear", "llama3")


def read_model_config(folder: Path) -> ModelConfig:
    """Read config.json of a model folder.

    Raises:
        ModelFileMissingError: no such file.
        ModelConfigError: malformed, or a value missing or impossible.
        UnsupportedModelError: another architecture, rope type or activation.
    """
    return parse_model_config(read_json_object(folder / CONFIG_FILE))


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Turn the object of a config.json into a ModelConfig; errors as read_model_config."""
    family_name = raw.get("model_type")
    if not isinstance(family_name, str) or family_name not in _FAMILIES:
        found = family_name if isinstance(family_name, str) else raw.get("architectures")
        raise UnsupportedModelError("model type", found, ", ".join(_FAMILIES))
    family = _FAMILIES[family_name]
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError("hidden_act", activation, "silu")
    if raw.get("quantization_config") is not None:
        raise UnsupportedModelError("quantization_config", "present", "plain float32, bfloat16 or float16 weights")
    hidden_size = _count(raw, "hidden_size")
    num_heads = _count(raw, "num_attention_heads")
    num_layers = _count(raw, "num_hidden_layers")
    num_kv_heads = _count(raw, "num_key_value_heads", num_heads if family_name == "llama" else None)
    if num_heads % num_kv_heads:
        raise _bad("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    head_dim = _count(raw, "head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise _bad("head_dim", f"must be even, is {head_dim}")
    attention_bias = _flag(raw, "attention_bias")
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    max_position = _count(raw, "max_position_embeddings")
    return ModelConfig(
        family=family_name,
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_parse_rope(raw, max_position),
        windows=_parse_windows(raw, family_name, family, num_layers),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family_name == "llama" and _flag(raw, "mlp_bias"),
        qk_norm=family.qk_norm,
        tied_embeddings=_flag(raw, "tie_word_embeddings"),
        weights_dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
    )


def _parse_windows(raw: Mapping[str, Any], family_name: str, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """Mistral's window is on every layer; Qwen's on the layers from max_window_layers on, and only if switched on."""
    if family.default_window is None or raw.get("sliding_window", family.default_window) is None:
        return (None,) * num_layers
    window = _count(raw, "sliding_window", family.default_window)
    if family_name == "mistral":
        return (window,) * num_layers
    if not _flag(raw, "use_sliding_window"):
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise _bad("max_window_layers", f"must be an integer, is {first!r}")
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise _bad("layer_types", f"must be a list of {num_layers}")
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise UnsupportedModelError("layer type", unknown[0], "full_attention, sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _parse_rope(raw: Mapping[str, Any], max_position: int) -> RopeConfig:
    parameters = raw.get("rope_parameters")
    if parameters is None:
        scaling = raw.get("rope_scaling")
        parameters = {"rope_theta": raw.get("rope_theta", 10000.0), **(scaling if isinstance(scaling, dict) else {})}
    if not isinstance(parameters, dict):
        raise _bad("rope_parameters", "must be an object")
    parameters = {"rope_theta": raw.get("rope_theta", 10000.0), **parameters}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise UnsupportedModelError("rope type", kind, ", ".join(_ROPE_KINDS))
    if (part := raw.get("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0))) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor", part, "1.0")
    theta = _number(parameters, "rope_theta")
    if kind == "default":
        return RopeConfig(theta)
    factor = _number(parameters, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    if high <= low:
        raise _bad("high_freq_factor", f"must exceed low_freq_factor {low}, is {high}")
    original = _count(parameters, "original_max_position_embeddings", max_position)
    return RopeConfig(theta, kind, factor, low, high, original)


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; a missing or null one is `default`, or refused."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise _bad(key, f"must be a positive integer, is {value!r}")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise _bad(key, f"must be a positive number, is {value!r}")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise _bad(key, f"must be true or false, is {value!r}")
    return bool(value)


def _bad(key: str, problem: str) -> ModelConfigError:
    return ModelConfigError(CONFIG_FILE, f"{key} {problem}")
