"""ModelConfig: one frozen value with all that the decoder needs to know, read from a Hugging Face config.json.

What a family is made of stands in families/table.py; here it meets what its config.json says. Both config styles
are read: rope_theta with rope_scaling (transformers 4) and rope_parameters (transformers 5). What is not built is
refused with a typed error, never approximated.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from kvkeeper.common.service.extras import install_command

from .checkpoint.errors import ModelError, UnsupportedModelError
from .checkpoint.json_file import CONFIG_FILE, bad, count, flag, number
from .checkpoint.text_part import WRAPPER, lacks_type, read_text_config, unwrap
from .experts_config import ExpertsConfig, parse_experts
from .families.default_sizes import DEFAULT_SIZES
from .families.family import Family, QkNorm
from .families.table import FAMILIES
from .latent_config import LatentConfig, parse_latent
from .layer_groups import Heads
from .layer_kinds import MIXING, LayerPart, parse_chunks, parse_parts, parse_unrotated, parse_windows
from .layer_shapes import LayerInputsConfig, parse_layers, parse_width
from .quantised.scheme import FIELD, Scheme, parse_scheme
from .recurrent.recurrent_config import RecurrentConfig, parse_recurrent
from .rope_config import RopeConfig, parse_local_rope, parse_rope


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries are multiplied by 1 + growth * log(1 + floor((position + 1) / step)): attention stays sharp over many keys.

    Scalable softmax (arXiv 2501.19399), as Llama 4 has it.
    """

    step: float
    growth: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder is parameterised by.

    Attributes:
        windows: per layer, the keys visible to a query, itself included; None: all.
        weights_dtype: name of the dtype that config.json states for the weights, or None.
        local_rope: of layers with a window, where they have their own; None: `rope` for all.
        activation: of the MLP's gate: silu, gelu_tanh or clamped_swiglu; or relu2, of an MLP that has no gate.
        swiglu_alpha, swiglu_limit: of clamped_swiglu.
        qk_norm: of queries and keys: none, of each head, of all heads at once, or of each rotated head without a weight (unit).
        qk_norm_eps: of that norm.
        chunks: per layer, the size of the chunks that a query sees its own of; None: it sees what `windows` says. (): no layer.
        unrotated: layers without rotation.
        temperature: of the queries of unrotated layers.
        pairs_sides: stored weights pair the dimensions that are rotated side by side.
        norms: before attention and MLP, after them (of what they give, before it is added), or both.
        norm_offset: norms multiply by 1 + weight; the loader adds the 1, which is exact in float32.
        embed_scale: factor of the embeddings. query_scalar: its -0.5th power scales the scores, instead of head_dim's.
        score_scale: factor of the scores, instead of either. logit_divisor: of the logits.
        residual_scale: factor of what attention and MLP give, before it is added.
        attention_soft_cap, logit_soft_cap: bounds that scores and logits are bent towards.
        has_sink_logits: each head's softmax has a key without a value, with a score of its own.
        has_output_gate: what each head attends to is multiplied by the sigmoid of a projection of its own.
        latent: attention is over latents; then head_dim is a slot's, of one KV head. None: over K and V.
        recurrent: some layers keep a state instead of K and V. None: all are attention.
        layer_heads: KV heads of each layer, and their size, where layers differ. (): all have num_kv_heads of head_dim.
        kv_sources: of the last layers, which store no K and V, the layers whose they read. (): every layer stores its own.
        keys_as_values: layers whose values are their keys, before norm and rotation.
        has_value_norm: values are normalised in each head, without a weight.
        has_wide_sharers: MLPs of the layers that store no K and V are twice as wide.
        layer_inputs: each layer adds an input of its own for each token. None: it does not.
        has_layer_scales: what each layer gives is multiplied by a number of its own.
        parts: of each layer, what it has alone. (): each attends, or keeps a state, and has an MLP.
        experts: None: every MLP is one.
        scheme: how projections are stored; None: as plain numbers.
        wrapper: the type of the model that it is the text part of; empty: it stands alone.
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
    qk_norm: QkNorm
    tied_embeddings: bool
    weights_dtype: str | None
    qk_norm_eps: float = 1e-6
    local_rope: RopeConfig | None = None
    activation: str = "silu"
    norm_offset: bool = False
    norms: Literal["before", "after", "both"] = "before"
    embed_scale: float | None = None
    query_scalar: float | None = None
    score_scale: float | None = None
    residual_scale: float | None = None
    logit_divisor: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    has_sink_logits: bool = False
    chunks: tuple[int | None, ...] = ()
    unrotated: frozenset[int] = frozenset()
    temperature: Temperature | None = None
    pairs_sides: bool = False
    has_output_gate: bool = False
    latent: LatentConfig | None = None
    recurrent: RecurrentConfig | None = None
    layer_heads: tuple[Heads, ...] = ()
    kv_sources: tuple[int, ...] = ()
    keys_as_values: frozenset[int] = frozenset()
    has_value_norm: bool = False
    has_wide_sharers: bool = False
    layer_inputs: LayerInputsConfig | None = None
    has_layer_scales: bool = False
    parts: tuple[LayerPart, ...] = ()
    experts: ExpertsConfig | None = None
    scheme: Scheme | None = None
    wrapper: str = ""

    @property
    def is_latent(self) -> bool:
        """Whether a slot of the cache holds a latent instead of K and V."""
        return self.latent is not None

    @property
    def attending(self) -> tuple[int, ...]:
        """The layers that attend."""
        recurrent = frozenset[int]() if self.recurrent is None else self.recurrent.layers
        return tuple(layer for layer in self.mixing if layer not in recurrent)

    @property
    def mixing(self) -> tuple[int, ...]:
        """The layers in which tokens learn of others."""
        return tuple(layer for layer in range(self.num_layers) if not self.parts or self.parts[layer] in MIXING)

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or experts."""
        return not self.parts or layer not in self.mixing

    @property
    def has_gates(self) -> bool:
        """Whether an MLP has a gate beside what it lets through."""
        return self.activation != "relu2"

    @property
    def query_groups(self) -> frozenset[int]:
        """How many heads of queries there are for one of K and V, in any layer."""
        return frozenset(self.num_heads // self.kv_heads(layer)[0] for layer in range(self.num_layers))

    @property
    def num_kv_layers(self) -> int:
        """Layers that store K and V, which come first."""
        return self.num_layers - len(self.kv_sources)

    @property
    def reads(self) -> tuple[int, ...]:
        """What each layer reads, its own or another one's K and V or state, by the number among the layers that store anything.

        0 for a layer that reads none. (): each reads its own.
        """
        if self.parts:
            numbers = {layer: number for number, layer in enumerate(self.mixing)}
            return tuple(numbers.get(layer, 0) for layer in range(self.num_layers))
        return (*range(self.num_kv_layers), *self.kv_sources) if self.kv_sources else ()

    def kv_heads(self, layer: int) -> Heads:
        """KV heads of a layer, and the size of each."""
        return self.layer_heads[layer] if self.layer_heads else (self.num_kv_heads, self.head_dim)

    def mlp_width(self, layer: int) -> int:
        """Inner width of a layer's MLP, without experts."""
        return self.intermediate_size * (2 if self.has_wide_sharers and layer >= self.num_kv_layers else 1)

    def rotation(self, layer: int) -> tuple[RopeConfig, int]:
        """The rope of a layer, and the dimensions of a head that its table is for."""
        rope = self.rope if self.local_rope is None or self.windows[layer] is None else self.local_rope
        return rope, self.kv_heads(layer)[1] if self.latent is None else self.latent.widths.rope

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        if self.latent is not None:
            return self.latent.scale
        return self.score_scale or (self.query_scalar or self.head_dim) ** -0.5


def is_native(model_type: object) -> bool:
    """Whether the decoder has this family."""
    return model_type in FAMILIES


def close_to(model_type: object, known: Iterable[str]) -> str:
    """The one of these that a misspelt type may mean, in words to continue with; empty: none."""
    found = get_close_matches(str(model_type), list(known), 1)
    return f" ({found[0]!r} is close to it)" if found else ""


def not_native(model_type: object) -> UnsupportedModelError:
    """The refusal of a type that only the transformers library may know, where that is not installed."""
    families = f"the native families, {', '.join(FAMILIES)}{close_to(model_type, FAMILIES)}"
    supported = f"{families}; and what the transformers library knows, with: {install_command('transformers')}"
    return UnsupportedModelError("model type", model_type, supported)


def why_library(raw: Mapping[str, Any], *, has_library: bool) -> str:
    """Why transformers computes the model: its family is not native, or its config asks for what the decoder lacks.

    Empty: it does not, or reading the config natively gives a better error.
    """
    if raw.get("model_type") is None:
        return ""
    if not is_native(raw["model_type"]):
        return "the family is not native" if raw.get(FIELD) is None and not lacks_type(raw) else ""
    try:
        parse_model_config(raw)
    except UnsupportedModelError as error:
        # The library's recurrent layers have states of their own: its refusal would not name what is not built.
        by_library = has_library and raw.get(FIELD) is None and FAMILIES[raw["model_type"]].recurrent is None
        return str(error) if by_library else ""
    except ModelError:
        return ""
    return ""


def read_model_config(folder: Path) -> ModelConfig:
    """Read config.json of a model folder.

    Raises:
        ModelFileMissingError: no such file.
        ModelConfigError: malformed, or a value missing or impossible.
        UnsupportedModelError: another architecture, rope type or activation.
    """
    return parse_model_config(read_text_config(folder))


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Turn the object of a config.json into a ModelConfig; errors as read_model_config."""
    raw = _with_defaults(unwrap(raw))
    family_name = _find_family(raw)
    family = FAMILIES[family_name]
    _check_activation(raw, family)
    hidden_size = count(raw, "hidden_size")
    parts = parse_parts(raw, family)
    num_layers = len(parts) or count(raw, "num_hidden_layers")
    num_heads, num_kv_heads, head_dim = _parse_heads(raw, family, hidden_size)
    attention_bias = family.biased if raw.get("attention_bias") is None else flag(raw, "attention_bias")
    max_position = count(raw, "max_position_embeddings")
    rope = parse_rope(raw if family.has_rope else {}, max_position, family)
    latent = None if family.latent is None else parse_latent(raw, family.latent, rope, hidden_size // num_heads)
    if latent is not None:
        num_kv_heads, head_dim = 1, latent.widths.latent + latent.widths.rope
    max_position = _limit_by_rope(rope, max_position, head_dim if latent is None else latent.widths.rope)
    unrotated = parse_unrotated(raw, family, num_layers)
    windows = parse_windows(raw, family, num_layers)
    qk_norm = _parse_qk_norm(raw, family)
    eps = qk_eps = number(raw, "rms_norm_eps", family.default_eps)
    if qk_norm == "unit":  # normalised behind the rotation, whose factor is then left in the eps alone
        qk_eps, rope = eps / rope.magnitude**2, replace(rope, magnitude=1.0)
    return ModelConfig(
        family=family_name,
        vocab_size=count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=parse_width(raw, family),
        num_layers=num_layers,
        num_heads=num_heads,
        max_position=max(max_position, rope.max_position),
        rms_norm_eps=eps,
        rope=rope,
        windows=windows,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=flag(raw, "mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        qk_norm=qk_norm,
        qk_norm_eps=qk_eps,
        chunks=parse_chunks(raw, family, unrotated, num_layers) if family.has_chunks else (),
        unrotated=unrotated,
        temperature=_parse_temperature(raw) if family.has_query_growth else None,
        pairs_sides=family.pairs_sides,
        tied_embeddings=family.is_tied if raw.get("tie_word_embeddings") is None else flag(raw, "tie_word_embeddings"),
        weights_dtype=_find_dtype(raw),
        local_rope=parse_local_rope(raw, max_position, family.local_theta),
        activation=family.activation,
        has_sink_logits=family.has_sink_logits,
        has_output_gate=family.has_output_gate,
        latent=latent,
        recurrent=None if family.recurrent is None else parse_recurrent(raw, family.recurrent, num_layers, parts),
        norm_offset=family.has_norm_offset,
        norms=family.norms,
        parts=parts,
        experts=parse_experts(raw, family, num_layers, parts),
        scheme=parse_scheme(raw),
        wrapper=raw.get(WRAPPER, ""),
        **_parse_scales(raw, family, hidden_size, num_layers),
        **parse_layers(raw, family, windows, num_heads, (num_kv_heads, head_dim)),
    )


def _with_defaults(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with the sizes that only the config of a text part leaves out, and its family's own fields under usual names."""
    model_type = str(raw.get("model_type"))
    named = FAMILIES[model_type].fields if model_type in FAMILIES else {}
    sizes = DEFAULT_SIZES.get(model_type, {}) if raw.get(WRAPPER) else {}
    return {**sizes, **raw, **{usual: raw[own] for own, usual in named.items() if raw.get(own) is not None}}


def _find_family(raw: Mapping[str, Any]) -> str:
    family_name = raw.get("model_type")
    if not isinstance(family_name, str) or family_name not in FAMILIES:
        if lacks_type(raw):
            raise bad("text_config.model_type", f"must name the family of the text model that is in {family_name!r}")
        if raw.get(FIELD) is not None:
            raise UnsupportedModelError(f"{FIELD} with model type", family_name, ", ".join(FAMILIES))
        if isinstance(family_name, str):
            raise UnsupportedModelError("model type", family_name, ", ".join(FAMILIES))
        raise _without_type(raw)
    return family_name


def _parse_heads(raw: Mapping[str, Any], family: Family, hidden_size: int) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and values, and the size of each."""
    num_heads = count(raw, "num_attention_heads")
    num_kv_heads = count(raw, "num_key_value_heads", None if family.needs_kv_heads else num_heads)
    if family.latent is not None and num_kv_heads != num_heads:
        raise bad("num_key_value_heads", f"must be num_attention_heads {num_heads} with latents, is {num_kv_heads}")
    if num_heads % num_kv_heads:
        raise bad("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    head_dim = count(raw, "head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise bad("head_dim", f"must be even, is {head_dim}")
    return num_heads, num_kv_heads, head_dim


def _parse_qk_norm(raw: Mapping[str, Any], family: Family) -> QkNorm:
    is_off = family.qk_norm == "unit" and raw.get("use_qk_norm") is not None and not flag(raw, "use_qk_norm")
    return "none" if is_off else family.qk_norm


def _find_dtype(raw: Mapping[str, Any]) -> str | None:
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else None


def _without_type(raw: Mapping[str, Any]) -> UnsupportedModelError:
    said = raw.get("architectures")
    architecture = str(said[0]) if isinstance(said, list) and said else ""
    stem = architecture.removesuffix("ForCausalLM").lower()
    found = next((name for name in FAMILIES if name.removesuffix("_text").replace("_", "") == stem), "")
    wanted = f'a {CONFIG_FILE} with "model_type": "{found}"' if found else f"a {CONFIG_FILE} with the family's model_type"
    why = f"{CONFIG_FILE} has none, for the architecture {architecture!r}" if architecture else f"{CONFIG_FILE} has none"
    return UnsupportedModelError("model type", None, wanted, why)


def _check_activation(raw: Mapping[str, Any], family: Family) -> None:
    """The field that the library reads, and no other, has to name the family's; absent or null it is the default."""
    allowed = [{"gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}.get(family.activation, "silu")]
    allowed += ["gelu"] if family.gelu_is_tanh else []
    if (activation := raw.get(family.activation_key)) is not None and activation not in allowed:
        raise UnsupportedModelError(family.activation_key, activation, ", ".join(allowed))
    if raw.get("use_bidirectional_attention") not in (None, False, *family.two_way):
        raise UnsupportedModelError("use_bidirectional_attention", raw["use_bidirectional_attention"], "causal attention")


def _limit_by_rope(rope: RopeConfig, max_position: int, rope_dim: int) -> int:
    """The most positions, of the rotation of heads, or parts of them, of rope_dim dimensions."""
    rotated_dim = rope.rotated_dim(rope_dim)
    if rotated_dim < 2 or rotated_dim % 2:
        raise bad("partial_rotary_factor", f"must give an even number of dimensions, gives {rotated_dim} of {rope_dim}")
    if rope.kind != "longrope":
        return max_position
    if len(rope.divisors) != rotated_dim // 2:
        raise bad("short_factor", f"must have {rotated_dim // 2} numbers, has {len(rope.divisors)}")
    return min(max_position, rope.original_max_position)


def _parse_scales(raw: Mapping[str, Any], family: Family, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """Factors and bounds of what the layers compute, by their names in ModelConfig."""
    scalar = None if family.query_scalar is None else number(raw, "query_pre_attn_scalar", family.query_scalar)
    return {
        "embed_scale": _embed_scale(raw, family, hidden_size),
        "score_scale": family.score_scale or _multiplier(raw, family, "attention_multiplier"),
        "residual_scale": _residual_scale(raw, family, num_layers),
        "logit_divisor": _logit_divisor(raw, family, hidden_size),
        "query_scalar": scalar,
        "swiglu_alpha": number(raw, "swiglu_alpha", 1.702),
        "swiglu_limit": number(raw, "swiglu_limit", 7.0),
        "attention_soft_cap": _soft_cap(raw, "attn_logit_softcapping", family, 0),
        "logit_soft_cap": _soft_cap(raw, "final_logit_softcapping", family, 1),
    }


def _soft_cap(raw: Mapping[str, Any], key: str, family: Family, idx: int) -> float | None:
    """Absent is the family's default, null is none."""
    if family.soft_caps is None:
        return None
    if key not in raw:
        return family.soft_caps[idx]
    return None if raw[key] is None else number(raw, key)


def _embed_scale(raw: Mapping[str, Any], family: Family, hidden_size: int) -> float | None:
    if family.scales_embeddings:
        return float(hidden_size**0.5)
    return number(raw, "scale_emb", 12) if family.has_depth_scales else _multiplier(raw, family, "embedding_multiplier")


def _residual_scale(raw: Mapping[str, Any], family: Family, num_layers: int) -> float | None:
    """scale_depth (MiniCPM, arXiv 2404.06395) is 1.4 where config.json does not speak of it, and null is none."""
    if not family.has_depth_scales:
        return _multiplier(raw, family, "residual_multiplier")
    if "scale_depth" in raw and raw["scale_depth"] is None:
        return None
    return number(raw, "scale_depth", 1.4) / float(num_layers**0.5)


def _logit_divisor(raw: Mapping[str, Any], family: Family, hidden_size: int) -> float | None:
    if not family.has_depth_scales:
        return _multiplier(raw, family, "logits_scaling")
    if "dim_model_base" in raw and raw["dim_model_base"] is None:
        return None
    return hidden_size / number(raw, "dim_model_base", 256)


def _multiplier(raw: Mapping[str, Any], family: Family, key: str) -> float | None:
    """None where the family has none; 1 where config.json has none."""
    return number(raw, key, 1.0) if family.has_multipliers else None


def _parse_temperature(raw: Mapping[str, Any]) -> Temperature | None:
    """attn_temperature_tuning is on where config.json does not speak of it."""
    if raw.get("attn_temperature_tuning") is not None and not flag(raw, "attn_temperature_tuning"):
        return None
    return Temperature(number(raw, "floor_scale", 8192.0), number(raw, "attn_scale", 0.1))
