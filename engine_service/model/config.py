"""ModelConfig: one frozen value with all that the decoder needs to know, read from a Hugging Face config.json.

Families differ only in the data here: biases, norms on queries and keys, where their windows are. Both config styles
are read: rope_theta with rope_scaling (transformers 4) and rope_parameters (transformers 5). What is not built is
refused with a typed error, never approximated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .checkpoint.errors import UnsupportedModelError
from .checkpoint.json_fields import CONFIG_FILE, bad, count, flag, number
from .checkpoint.json_file import read_json_object
from .rope_config import RopeConfig, parse_local_rope, parse_rope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder is parameterised by.

    Attributes:
        windows: per layer, the keys visible to a query, itself included; None: all.
        weights_dtype: name of the dtype that config.json states for the weights, or None.
        local_rope: of layers with a window, where they have their own; None: `rope` for all.
        activation: of the MLP's gate, silu or gelu_tanh.
        norm_offset: norms multiply by 1 + weight; the loader adds the 1, which is exact in float32.
        out_norms: what attention and MLP give is normalised before it is added.
        embed_scale: factor of the embeddings. query_scalar: its -0.5th power scales the scores, instead of head_dim's.
        attention_soft_cap, logit_soft_cap: bounds that scores and logits are bent towards.
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
    local_rope: RopeConfig | None = None
    activation: str = "silu"
    norm_offset: bool = False
    out_norms: bool = False
    embed_scale: float | None = None
    query_scalar: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return (self.query_scalar or self.head_dim) ** -0.5


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family differs from Llama. None for a bias: config.json's attention_bias says (default: none)."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None  # default where config.json has none; None: hidden_size / num_heads
    default_window: int | None = None
    full_every: int | None = None  # windows on all layers but every so many; default where layer_types says nothing
    is_gemma: bool = False  # scaled embeddings, norms with 1 + weight, a GELU gate, tied by default
    query_scalar: float | None = None  # default of query_pre_attn_scalar; None: the family has none
    soft_caps: tuple[float | None, float | None] = (None, None)  # defaults: of scores, of logits
    out_norms: bool = False
    local_theta: float | None = None  # windows have a rope of their own, with this base by default
    default_theta: float = 10_000.0


_FAMILIES: Final[Mapping[str, _Family]] = {
    "llama": _Family(),
    "mistral": _Family(qkv_bias=False, o_bias=False, default_window=4096),
    "qwen2": _Family(qkv_bias=True, o_bias=False, default_window=4096),
    "qwen3": _Family(qk_norm=True, head_dim=128, default_window=4096),
    "gemma": _Family(is_gemma=True, head_dim=256),
    "gemma2": _Family(
        is_gemma=True,
        head_dim=256,
        default_window=4096,
        full_every=2,
        query_scalar=256,
        soft_caps=(50.0, 30.0),
        out_norms=True,
    ),
    "gemma3_text": _Family(
        is_gemma=True,
        head_dim=256,
        default_window=4096,
        full_every=6,
        query_scalar=256,
        out_norms=True,
        qk_norm=True,
        local_theta=10_000.0,
        default_theta=1_000_000.0,
    ),
}


def is_native(model_type: object) -> bool:
    """Whether the decoder has this family."""
    return model_type in _FAMILIES


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
    _check_activation(raw, family)
    if raw.get("quantization_config") is not None:
        raise UnsupportedModelError("quantization_config", "present", "plain float32, bfloat16 or float16 weights")
    hidden_size = count(raw, "hidden_size")
    num_heads = count(raw, "num_attention_heads")
    num_layers = count(raw, "num_hidden_layers")
    num_kv_heads = count(raw, "num_key_value_heads", num_heads if family_name == "llama" else None)
    if num_heads % num_kv_heads:
        raise bad("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    head_dim = count(raw, "head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise bad("head_dim", f"must be even, is {head_dim}")
    attention_bias = flag(raw, "attention_bias")
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    max_position = count(raw, "max_position_embeddings")
    rope = parse_rope(raw, max_position, family.default_theta)
    return ModelConfig(
        family=family_name,
        vocab_size=count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max(max_position, rope.max_position),
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope=rope,
        windows=_parse_windows(raw, family_name, family, num_layers),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family_name == "llama" and flag(raw, "mlp_bias"),
        qk_norm=family.qk_norm,
        tied_embeddings=family.is_gemma if raw.get("tie_word_embeddings") is None else flag(raw, "tie_word_embeddings"),
        weights_dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        local_rope=parse_local_rope(raw, max_position, family.local_theta),
        activation="gelu_tanh" if family.is_gemma else "silu",
        norm_offset=family.is_gemma,
        out_norms=family.out_norms,
        embed_scale=hidden_size**0.5 if family.is_gemma else None,
        query_scalar=None if family.query_scalar is None else number(raw, "query_pre_attn_scalar", family.query_scalar),
        attention_soft_cap=_soft_cap(raw, "attn_logit_softcapping", family.soft_caps[0]) if family.out_norms else None,
        logit_soft_cap=_soft_cap(raw, "final_logit_softcapping", family.soft_caps[1]) if family.out_norms else None,
    )


def _check_activation(raw: Mapping[str, Any], family: _Family) -> None:
    """Gemma's first releases say "gelu" and mean the tanh approximation, as transformers reads them."""
    key = "hidden_activation" if raw.get("hidden_activation") is not None else "hidden_act"
    allowed = ("gelu_pytorch_tanh", "gelu") if family.is_gemma else ("silu",)
    if (activation := raw.get(key, allowed[0])) not in allowed:
        raise UnsupportedModelError(key, activation, ", ".join(allowed))
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention", True, "causal attention")


def _soft_cap(raw: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """Absent is the family's default, null is none."""
    if key not in raw:
        return default
    return None if raw[key] is None else number(raw, key)


def _parse_windows(raw: Mapping[str, Any], family_name: str, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """Mistral's window is on every layer; Qwen's on the layers from max_window_layers on, and only if switched on; Gemma
    has layers without one in turn.
    """
    if family.default_window is None or raw.get("sliding_window", family.default_window) is None:
        return (None,) * num_layers
    window = count(raw, "sliding_window", family.default_window)
    if family_name == "mistral":
        return (window,) * num_layers
    if not family.is_gemma and not flag(raw, "use_sliding_window"):
        return (None,) * num_layers
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
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
