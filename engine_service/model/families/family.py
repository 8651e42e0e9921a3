"""Family: how a model family differs from Llama, as data. Knows no config.json and no tensor.

A field is one feature and brings no other along. Features that the decoder does not compute together are no family.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

WindowRule = Literal["none", "all", "switched", "switched_all", "in_turn"]
QkNorm = Literal["none", "head", "whole", "unit"]
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a family chooses a token's experts, and what its config.json leaves out.

    Attributes:
        scoring: softmax over all experts, or each one's sigmoid.
        methods: values of topk_method that are served, the first the default; the last one goes by groups.
            (): it is not heeded.
        group_score: a group is as good as its best expert, or as its best two together.
        has_correction: e_score_correction_bias is added where experts are chosen.
        is_wide: the router computes in float32.
        renormalises: default of norm_topk_prob; None: it is not heeded, and weights are not renormalised.
        scale: default of routed_scaling_factor; None: it is not heeded. groups: of n_group and topk_group, likewise.
        first_dense: of first_k_dense_replace.
        has_layer_types: mlp_layer_types says which layers have experts, where it is there.
        has_moe_layers: moe_layers says it; by default every interleave_moe_layer_step-th.
        weighs_inputs: an expert's input is weighed instead of its output.
        least: added to the sum that renormalised weights are divided by.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    methods: tuple[str, ...] = ()
    group_score: Literal["best", "best_two"] = "best"
    has_correction: bool = False
    is_wide: bool = False
    renormalises: bool | None = False
    scale: float | None = None
    groups: tuple[int, int] | None = None
    first_dense: int = 0
    has_layer_types: bool = False
    has_moe_layers: bool = False
    weighs_inputs: bool = False
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class LatentFamily:
    """Latent attention, and defaults of q_lora_rank, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim and v_head_dim.

    query_rank: None: queries have a rank only where q_lora_rank says one.
    pairs: how stored weights pair the dimensions that are rotated: side by side, half a head apart, or as rope_interleave says.
    has_head_gates: what each head attends to is weighed by a sigmoid of its own.
    """

    query_rank: int | None
    latent: int
    rope: int
    key: int
    value: int | None
    pairs: Literal["sides", "halves", "switched"]
    has_head_gates: bool = False


@dataclass(frozen=True, slots=True)
class DeltaFamily:
    """Layers of a gated delta net beside layers of attention, and defaults of linear_num_key_heads, linear_num_value_heads,
    linear_key_head_dim, linear_value_head_dim and linear_conv_kernel_dim.

    full_every: of full_attention_interval, where layer_types does not say which layers are which.
    is_mixed: what a layer projects is stored key head by key head, each with all kinds; otherwise kind by kind.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    full_every: int
    is_mixed: bool = True
    layer_type: ClassVar = "linear_attention"


@dataclass(frozen=True, slots=True)
class KimiDeltaFamily:
    """Layers of Kimi Delta Attention beside layers of attention; defaults of linear_num_heads, linear_head_dim and
    linear_conv_kernel_dim.

    full_every: of full_attention_interval, where no list says which layers are which.
    has_gate_rank: gates are projected by way of as many numbers as a head has, and each head's A_log is stored on four axes.
    has_heads_of_attention: num_attention_heads and head_dim are theirs, too, where config.json says nothing of their own.
    least: default of kda_lower_bound, which bounds how much is forgotten unless kda_safe_gate is off; None: nothing does.
    only: fields of config.json that have one value each in what is served.
    """

    heads: int = 32
    head_dim: int = 128
    kernel: int = 4
    full_every: int = 4
    has_gate_rank: bool = True
    has_heads_of_attention: bool = False
    least: float | None = None
    only: Mapping[str, Any] = field(default_factory=dict)
    layer_type: ClassVar = "linear_attention"


@dataclass(frozen=True, slots=True)
class ScanFamily:
    """Layers of Mamba 2; defaults of mamba_num_heads, mamba_head_dim, n_groups, ssm_state_size and conv_kernel."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    kernel: int
    layer_type: ClassVar = "mamba"


@dataclass(frozen=True, slots=True)
class ConvFamily:
    """Layers of a short convolution beside layers of attention, and the default of conv_L_cache, the tokens that it reads."""

    kernel: int
    layer_type: ClassVar = "conv"


RecurrentFamily = DeltaFamily | KimiDeltaFamily | ConvFamily | ScanFamily


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family stores its experts: names of the block, and of gate, up and down within each expert ("": no gate).

    Attributes:
        always_renormalises: the weights of a token's experts add up to 1; False: config.json's norm_topk_prob says.
        intermediate_key: the field of config.json with an expert's width.
        router: its name in the block.
        form: stored one by one; or stacked, the inputs of each before its outputs, and gate and up in turn (halves: one behind
            the other); or as one by one, but of all experts together (outputs_first), which a quantised checkpoint does not do.
        has_bias: of the router, and of stacked experts.
        shared: name of the MLP in the block that all tokens go through; "": none. default_shared: of n_shared_experts.
        shared_key: the field of config.json with its width; "": it is n_shared_experts times an expert's.
        shared_gate: name of what weighs it by the sigmoid of one product; "": it counts as it is.
        switch_key: the field of config.json that says whether there are any; "": there are.
        chosen_key: the field of config.json with how many a token has.
        is_beside: they are beside an MLP, in the layer itself, with norms of their own and a factor for each.
        latent_key: the field of config.json with the width that tokens are projected to before they go through their experts,
            and back behind them; "": they are not.
    """

    block: str
    projections: tuple[str, str, str]
    always_renormalises: bool
    intermediate_key: str
    router: str = "gate"
    form: Literal["single", "stacked", "halves", "outputs_first"] = "single"
    has_bias: bool = False
    shared: str = ""
    default_shared: int = 1
    shared_key: str = ""
    shared_gate: str = ""
    switch_key: str = ""
    chosen_key: str = "num_experts_per_tok"
    is_beside: bool = False
    latent_key: str = ""
    routing: RoutingRule = RoutingRule()


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from Llama.

    Attributes:
        qkv_bias, o_bias, mlp_bias: None: config.json's attention_bias or mlp_bias says (default: none, or `biased`).
        biased: attention has biases where config.json does not speak of attention_bias.
        needs_kv_heads: config.json has to state num_key_value_heads; otherwise they are as many as the heads.
        qk_norm: of queries and keys: none, of each head, of all heads at once, or of each rotated head without a weight (unit).
        norms: before attention and MLP, after them, or both.
        has_unrotated_layers: no_rope_layers says which layers are not rotated, by default every fourth.
        has_query_growth: the queries of those grow with the position (attn_temperature_tuning).
        has_chunks: layers read chunks of attention_chunk_size, by layer_types, or by default where they are rotated.
        default_chunk: of attention_chunk_size.
        pairs_sides: stored weights pair the dimensions that are rotated side by side, instead of half a head apart.
        has_rope: False: nothing is rotated.
        has_single_parts: each layer has either attention, a recurrence, an MLP or experts, as layers_block_type or
            hybrid_override_pattern says, behind the one norm that it has.
        mlp: name of the block of an MLP. mlp_width: the field of config.json with its width.
        adjusts_width: block_auto_adjust_ff_dim, which is on by default, makes it narrower (layer_shapes.py).
        head_dim: default where config.json has none; None: hidden_size / num_heads.
        windows: none; all: on all layers, where sliding_window is set; switched: by use_sliding_window, from
            max_window_layers on; switched_all: by use_sliding_window, on all layers; in_turn: on all but every full_every-th.
        default_window: where config.json does not speak of sliding_window; None: no window then.
        scales_embeddings: by the square root of hidden_size.
        activation: of an MLP's gate; clamped_swiglu goes by swiglu_alpha and swiglu_limit. relu2: of an MLP that has no gate.
        activation_key: the field of config.json that names it. gelu_is_tanh: what is called "gelu" there is gelu_tanh.
        has_norm_offset: norms multiply by 1 + weight.
        has_output_gate: what each head attends to is weighed by a sigmoid, whose inputs are projected beside its queries.
        query_scalar: default of query_pre_attn_scalar; None: the family has none.
        score_scale: factor of the scores; None: it follows from the size of the heads.
        two_way: values of use_bidirectional_attention with which text is read causally, as it is everywhere else.
        ends_in_full: the last layer reads all tokens, whatever config.json says of it.
        full_head_dim: layers without a window have heads of their own, as many and as large as config.json says. That is the
            default of global_head_dim; None: all layers have the same.
        shares_kv: the last num_kv_shared_layers layers read the K and V of the last layer of their kind before them, and
            use_double_wide_mlp makes their MLPs twice as wide.
        has_value_norm: values are normalised in each head, without a weight.
        layer_input: each layer adds an input of its own; the default of hidden_size_per_layer_input. None: it does not.
        has_layer_scales: what each layer gives is multiplied by a stored number.
        soft_caps: defaults, of scores and of logits; None: the family has none.
        local_theta: windows have a rope of their own, with this base by default.
        default_rope: the rope_parameters of a config.json without any; None: plain ones.
        has_partial_rope: partial_rotary_factor is heeded. default_part: where config.json does not speak of it.
        has_sink_logits: each head's softmax has one more key, with a learned score and without a value.
        has_multipliers: embeddings, scores, residual branches and logits have factors of their own.
        is_fused: queries, keys and values are stored as one tensor, and so are gate and up.
        has_depth_scales: scale_emb, scale_depth and dim_model_base are factors of embeddings, branches and logits.
        is_tied: the default of tie_word_embeddings.
        ignores_later_layers: checkpoints hold layers behind the last one, which predict further tokens and are not served.
        ignores: of such tensors, what their names begin with; "": there are none.
        latent: attention is over latent vectors; None: over K and V.
        fields: names of fields that its config.json alone has, with the usual ones.
        stored_names: parts of the names of tensors, and how they are stored.
        recurrent: some layers keep a state instead of K and V; None: all are attention.
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
    has_query_growth: bool = False
    has_chunks: bool = False
    default_chunk: int = 8192
    pairs_sides: bool = False
    has_rope: bool = True
    has_single_parts: bool = False
    mlp: str = "mlp"
    mlp_width: str = "intermediate_size"
    adjusts_width: bool = False
    head_dim: int | None = None
    windows: WindowRule = "none"
    default_window: int | None = None
    full_every: int | None = None
    scales_embeddings: bool = False
    activation: Activation = "silu"
    activation_key: str = "hidden_act"
    gelu_is_tanh: bool = False
    has_norm_offset: bool = False
    has_output_gate: bool = False
    query_scalar: float | None = None
    score_scale: float | None = None
    two_way: tuple[str, ...] = ()
    ends_in_full: bool = False
    full_head_dim: int | None = None
    shares_kv: bool = False
    has_value_norm: bool = False
    layer_input: int | None = None
    has_layer_scales: bool = False
    soft_caps: tuple[float | None, float | None] | None = None
    local_theta: float | None = None
    default_theta: float = 10_000.0
    default_eps: float = 1e-6
    default_rope: Mapping[str, Any] | None = None
    has_partial_rope: bool = False
    default_part: float = 1.0
    has_sink_logits: bool = False
    has_multipliers: bool = False
    is_fused: bool = False
    has_depth_scales: bool = False
    is_tied: bool = False
    ignores_later_layers: bool = False
    ignores: str = ""
    latent: LatentFamily | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    stored_names: Mapping[str, str] = field(default_factory=dict)
    recurrent: RecurrentFamily | None = None
    experts: ExpertNames | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for features that the decoder does not compute together."""
        has_windows, normed = self.windows != "none", self.qk_norm in ("head", "whole")
        of_scores = self.has_sink_logits, self.query_scalar, self.has_multipliers, self.soft_caps and self.soft_caps[0]
        of_heads = self.has_output_gate, self.pairs_sides, self.is_fused, self.qk_norm != "none", self.has_partial_rope
        of_layers = has_windows, self.has_chunks, self.has_unrotated_layers
        embed_scales = self.scales_embeddings, self.has_multipliers, self.has_depth_scales
        apart = {
            "latents and other terms of scores": self.latent and any(of_scores),
            "latents and other kinds of heads": self.latent and any(of_heads),
            "latents and other kinds of layers": self.latent and any(of_layers),
            "recurrent layers and windows, chunks or sinks": self.recurrent
            and (has_windows or self.has_chunks or self.has_sink_logits),
            "windows and chunks": has_windows and self.has_chunks,
            "growth of queries and rotated layers alone": self.has_query_growth and not self.has_unrotated_layers,
            "growth of queries and a norm that undoes it": self.has_query_growth and normed,
            "a norm over all heads and an order of their dimensions": self.qk_norm == "whole"
            and (self.pairs_sides or self.has_partial_rope),
            "a norm without a weight and 1 + weight": self.qk_norm == "unit" and self.has_norm_offset,
            "pairs side by side and heads that are rotated in part": self.pairs_sides and self.has_partial_rope,
            "a rope of windows and heads that are rotated in part": self.local_theta and self.has_partial_rope,
            "an output gate and one tensor for queries, keys and values": self.has_output_gate and self.is_fused,
            "two factors of scores": sum(map(bool, (self.query_scalar, self.has_multipliers, self.score_scale))) > 1,
            "heads of several shapes and other kinds of heads": self.full_head_dim
            and (self.latent or self.recurrent or any(of_heads[:3]) or self.has_partial_rope or self.qk_norm == "whole"),
            "shared K and V and other kinds of layers": self.shares_kv and (self.latent or self.recurrent or self.has_chunks),
            "inputs or scales of layers and norms behind them alone": (self.layer_input or self.has_layer_scales)
            and self.norms == "after",
            "two factors of embeddings": sum(embed_scales) > 1,
            "layers of one part and other kinds of layers": self.has_single_parts
            and (self.latent or self.shares_kv or self.layer_input or self.has_layer_scales or self.norms != "before"),
            "no rope and layers or heads that have one in part": not self.has_rope
            and (self.has_unrotated_layers or self.has_partial_rope or self.local_theta),
        }
        if found := [what for what, are_both in apart.items() if are_both]:
            raise ValueError(f"a family cannot have {found[0]}: the decoder does not compute them together")
