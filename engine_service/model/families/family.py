"""Family: how a model family differs from Llama, as data. Knows no config.json and no tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

WindowRule = Literal["none", "all", "switched", "switched_all", "in_turn"]
QkNorm = Literal["none", "head", "whole", "unit"]


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a family chooses a token's experts, and what its config.json leaves out.

    Attributes:
        scoring: softmax over all experts, or each one's sigmoid.
        methods: values of topk_method that are served, the first the default; the last one goes by groups.
            (): all go by groups.
        group_score: a group is as good as its best expert, or as its best two together.
        has_correction: e_score_correction_bias is added where experts are chosen.
        is_wide: the router computes in float32.
        renormalises: default of norm_topk_prob; None: it is not heeded, and weights are not renormalised.
        scale, groups, first_dense: defaults of routed_scaling_factor, of n_group and topk_group, and of first_k_dense_replace.
        has_layer_types: mlp_layer_types says which layers have experts; by default all but the first.
        has_moe_layers: moe_layers says it; by default every interleave_moe_layer_step-th.
        weighs_inputs: an expert's input is weighed instead of its output.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    methods: tuple[str, ...] = ()
    group_score: Literal["best", "best_two"] = "best"
    has_correction: bool = False
    is_wide: bool = False
    renormalises: bool | None = False
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    first_dense: int = 0
    has_layer_types: bool = False
    has_moe_layers: bool = False
    weighs_inputs: bool = False


@dataclass(frozen=True, slots=True)
class LatentFamily:
    """Latent attention, and defaults of q_lora_rank, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim and v_head_dim.

    pairs: how stored weights pair the dimensions that are rotated: side by side, half a head apart, or as rope_interleave says.
    """

    query_rank: int
    latent: int
    rope: int
    key: int
    value: int | None
    pairs: Literal["sides", "halves", "switched"]


@dataclass(frozen=True, slots=True)
class DeltaFamily:
    """Layers of a gated delta net beside layers of attention, and defaults of linear_num_key_heads, linear_num_value_heads,
    linear_key_head_dim, linear_value_head_dim and linear_conv_kernel_dim.

    full_every: of full_attention_interval, where layer_types does not say which layers are which.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    full_every: int


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family stores its experts: names of the block, and of gate, up and down within each expert.

    Attributes:
        always_renormalises: the weights of a token's experts add up to 1; False: config.json's norm_topk_prob says.
        intermediate_key: the field of config.json with an expert's width.
        router: its name in the block.
        form: stored one by one; or stacked, the inputs of each before its outputs, and gate and up in turn (halves: one behind
            the other).
        has_bias: of the router, and of stacked experts.
        shared: name of the MLP in the block that all tokens go through; "": none. default_shared: of n_shared_experts.
        shared_key: the field of config.json with its width; "": it is n_shared_experts times an expert's.
        shared_gate: name of what weighs it by the sigmoid of one product; "": it counts as it is.
    """

    block: str
    projections: tuple[str, str, str]
    always_renormalises: bool
    intermediate_key: str
    router: str = "gate"
    form: Literal["single", "stacked", "halves"] = "single"
    has_bias: bool = False
    shared: str = ""
    default_shared: int = 1
    shared_key: str = ""
    shared_gate: str = ""
    routing: RoutingRule = RoutingRule()


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from Llama.

    Attributes:
        qkv_bias, o_bias, mlp_bias: None: config.json's attention_bias or mlp_bias says (default: none, or `biased`).
        biased: attention has biases where config.json does not speak of attention_bias.
        needs_kv_heads: config.json has to state num_key_value_heads; otherwise they are as many as the heads.
        qk_norm: of queries and keys: none, of each head, of all heads at once, or of each head without a weight (unit).
        norms: before attention and MLP, after them, or both.
        has_unrotated_layers: no_rope_layers says which layers are not rotated, by default every fourth. Those have no qk_norm,
            and their queries grow with the position (attn_temperature_tuning).
        has_chunks: layers read chunks of attention_chunk_size, by layer_types, or by default where they are rotated.
        default_chunk: of attention_chunk_size.
        pairs_sides: stored weights pair the dimensions that are rotated side by side, instead of half a head apart.
        mlp: name of the block of an MLP. mlp_width: the field of config.json with its width.
        head_dim: default where config.json has none; None: hidden_size / num_heads.
        windows: none; all: on all layers, where sliding_window is set; switched: by use_sliding_window, from
            max_window_layers on; switched_all: by use_sliding_window, on all layers; in_turn: on all but every full_every-th.
        default_window: where config.json does not speak of sliding_window; None: no window then.
        is_gemma: scaled embeddings, norms with 1 + weight, a GELU gate, tied by default.
        has_norm_offset: norms multiply by 1 + weight.
        has_output_gate: what each head attends to is weighed by a sigmoid, whose inputs are projected beside its queries.
        query_scalar: default of query_pre_attn_scalar; None: the family has none.
        soft_caps: defaults, of scores and of logits; None: the family has none.
        local_theta: windows have a rope of their own, with this base by default.
        default_rope: the rope_parameters of a config.json without any; None: plain ones.
        has_partial_rope: partial_rotary_factor is heeded. default_part: where config.json does not speak of it.
        has_sink_logits: each head's softmax has one more key, with a learned score and without a value.
        has_clamped_swiglu: the gate is clamped_swiglu, by swiglu_alpha and swiglu_limit.
        has_multipliers: embeddings, scores, residual branches and logits have factors of their own.
        is_fused: queries, keys and values are stored as one tensor, and so are gate and up.
        has_depth_scales: scale_emb, scale_depth and dim_model_base are factors of embeddings, branches and logits.
        is_tied: the default of tie_word_embeddings.
        ignores_later_layers: checkpoints hold layers behind the last one, which predict further tokens and are not served.
        ignores: of such tensors, what their names begin with; "": there are none.
        latent: attention is over latent vectors; None: over K and V.
        delta: some layers are gated delta nets; None: all are attention.
        experts: an MLP is several experts; None: it is one.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = False
    biased: bool = False
    needs_kv_heads: bool = True
    qk_norm: QkNorm = "none"
    norms: Literal["before", "after", "both"] = "before"
    has_unrotated_layers: bool = False
    has_chunks: bool = False
    default_chunk: int = 8192
    pairs_sides: bool = False
    mlp: str = "mlp"
    mlp_width: str = "intermediate_size"
    head_dim: int | None = None
    windows: WindowRule = "none"
    default_window: int | None = None
    full_every: int | None = None
    is_gemma: bool = False
    has_norm_offset: bool = False
    has_output_gate: bool = False
    query_scalar: float | None = None
    soft_caps: tuple[float | None, float | None] | None = None
    local_theta: float | None = None
    default_theta: float = 10_000.0
    default_eps: float = 1e-6
    default_rope: Mapping[str, Any] | None = None
    has_partial_rope: bool = False
    default_part: float = 1.0
    has_sink_logits: bool = False
    has_clamped_swiglu: bool = False
    has_multipliers: bool = False
    is_fused: bool = False
    has_depth_scales: bool = False
    is_tied: bool = False
    ignores_later_layers: bool = False
    ignores: str = ""
    latent: LatentFamily | None = None
    delta: DeltaFamily | None = None
    experts: ExpertNames | None = None
