"""FAMILIES: every family that the decoder has, by the `model_type` of its config.json."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from .family import ConvFamily, DeltaFamily, ExpertNames, Family, KimiDeltaFamily, LatentFamily, RoutingRule, ScanFamily

_EACH = ("gate_proj", "up_proj", "down_proj")
# Experts are chosen by their sigmoids, from groups that are as good as their best two.
_BY_TWO = RoutingRule(
    scoring="sigmoid", group_score="best_two", has_correction=True, is_wide=True, renormalises=True, scale=1.0, groups=(1, 1)
)
_WITH_SHARED = ExpertNames(
    "mlp", _EACH, always_renormalises=False, intermediate_key="moe_intermediate_size", shared="shared_experts"
)
_DELTA = DeltaFamily(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4, full_every=4)
# What Qwen3-Next and Qwen3.5 have in common.
_WITH_DELTA = Family(
    qk_norm="head",
    head_dim=256,
    has_norm_offset=True,
    has_output_gate=True,
    has_partial_rope=True,
    default_part=0.25,
    ignores="mtp.",
    recurrent=_DELTA,
)
_QWEN3_5 = replace(_WITH_DELTA, recurrent=replace(_DELTA, is_mixed=False))
_LFM2 = Family(
    default_theta=1_000_000.0,
    default_eps=1e-5,
    is_tied=True,
    qk_norm="head",
    mlp="feed_forward",
    fields={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    stored_names={
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "feed_forward.gate_proj": "feed_forward.w1",
        "feed_forward.up_proj": "feed_forward.w3",
        "feed_forward.down_proj": "feed_forward.w2",
        "model.norm.": "model.embedding_norm.",
        "gate.e_score_correction_bias": "expert_bias",
    },
    recurrent=ConvFamily(kernel=3),
)
# Fields of Kimi Linear and Ling that have other names elsewhere.
_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_GEMMA4 = Family(
    scales_embeddings=True,
    activation="gelu_tanh",
    activation_key="hidden_activation",
    two_way=("vision",),
    is_tied=True,
    head_dim=256,
    full_head_dim=512,
    windows="in_turn",
    full_every=6,
    ends_in_full=True,
    shares_kv=True,
    score_scale=1.0,
    soft_caps=(None, None),
    norms="both",
    qk_norm="head",
    has_value_norm=True,
    has_layer_scales=True,
    local_theta=10_000.0,
    default_rope={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
)

FAMILIES: Final[Mapping[str, Family]] = {
    "bailing_hybrid": Family(
        needs_kv_heads=False,
        ignores_later_layers=True,
        default_theta=6_000_000.0,
        latent=LatentFamily(None, 512, 64, 128, 128, "sides", has_head_gates=True),
        fields={
            **_NAMES,
            "layer_group_size": "full_attention_interval",
            "moe_router_enable_expert_bias": "use_expert_bias",
            "score_function": "scoring_func",
            "short_conv_kernel_size": "linear_conv_kernel_dim",
        },
        stored_names={
            "self_attn.o_proj": "attention.dense",
            "self_attn.": "attention.",
            "gate.e_score_correction_bias": "gate.expert_bias",
        },
        recurrent=KimiDeltaFamily(
            full_every=6,
            has_gate_rank=False,
            has_heads_of_attention=True,
            least=-5.0,
            only={"gated_attention_proj_granularity_type": "head_wise", "no_kda_lora": True, "use_mla_nope": False},
        ),
        experts=replace(_WITH_SHARED, routing=replace(_BY_TWO, scale=2.5, groups=(8, 4), has_layer_types=True, first_dense=2)),
    ),
    "deepseek_v2": Family(
        mlp_bias=None,
        needs_kv_heads=False,
        ignores_later_layers=True,
        latent=LatentFamily(1536, 512, 64, 128, 128, "sides"),
        experts=replace(
            _WITH_SHARED,
            default_shared=2,
            routing=RoutingRule(
                methods=("greedy", "group_limited_greedy"), is_wide=True, renormalises=None, scale=1.0, groups=(1, 1)
            ),
        ),
    ),
    "deepseek_v3": Family(
        needs_kv_heads=False,
        ignores_later_layers=True,
        latent=LatentFamily(1536, 512, 64, 128, 128, "switched"),
        experts=replace(_WITH_SHARED, routing=replace(_BY_TWO, scale=2.5, groups=(8, 4), first_dense=3)),
    ),
    "gemma": Family(
        scales_embeddings=True,
        activation="gelu_tanh",
        gelu_is_tanh=True,  # its first releases say "gelu" and mean the approximation, as transformers reads them
        has_norm_offset=True,
        is_tied=True,
        head_dim=256,
    ),
    "gemma2": Family(
        scales_embeddings=True,
        activation="gelu_tanh",
        activation_key="hidden_activation",
        has_norm_offset=True,
        is_tied=True,
        head_dim=256,
        windows="in_turn",
        default_window=4096,
        full_every=2,
        query_scalar=256,
        soft_caps=(50.0, 30.0),
        norms="both",
    ),
    "gemma3_text": Family(
        scales_embeddings=True,
        activation="gelu_tanh",
        activation_key="hidden_activation",
        has_norm_offset=True,
        is_tied=True,
        head_dim=256,
        windows="in_turn",
        default_window=4096,
        full_every=6,
        query_scalar=256,
        soft_caps=(None, None),
        norms="both",
        qk_norm="head",
        local_theta=10_000.0,
        default_theta=1_000_000.0,
    ),
    "gemma4_text": replace(
        _GEMMA4,
        default_window=512,
        layer_input=256,
        experts=ExpertNames(
            "",
            _EACH,
            always_renormalises=True,
            intermediate_key="moe_intermediate_size",
            router="router.proj",
            form="outputs_first",
            switch_key="enable_moe_block",
            chosen_key="top_k_experts",
            is_beside=True,
        ),
    ),
    "gemma4_unified_text": replace(_GEMMA4, default_window=1024),
    "glm4_moe_lite": Family(
        needs_kv_heads=False,
        default_eps=1e-5,
        ignores_later_layers=True,
        latent=LatentFamily(768, 512, 64, 192, 256, "switched"),
        experts=replace(_WITH_SHARED, routing=replace(_BY_TWO, scale=1.8, has_layer_types=True, first_dense=1)),
    ),
    "gpt_oss": Family(
        biased=True,
        mlp_bias=True,
        head_dim=64,
        windows="in_turn",
        default_window=128,
        full_every=2,
        default_theta=150_000.0,
        default_eps=1e-5,
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        has_sink_logits=True,
        activation="clamped_swiglu",
        experts=ExpertNames(
            "mlp",
            ("gate_up_proj", "gate_up_proj", "down_proj"),
            always_renormalises=True,
            intermediate_key="intermediate_size",
            router="router",
            form="stacked",
            has_bias=True,
        ),
    ),
    "granite": Family(mlp_bias=None, needs_kv_heads=False, has_multipliers=True),
    "kimi_linear": Family(
        needs_kv_heads=False,
        default_eps=1e-5,
        has_rope=False,
        ignores_later_layers=True,
        latent=LatentFamily(None, 512, 64, 128, 128, "halves"),
        fields={**_NAMES, "moe_router_activation_func": "scoring_func"},
        recurrent=KimiDeltaFamily(only={"mla_use_nope": True}),
        experts=replace(
            _WITH_SHARED,
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
            routing=replace(_BY_TWO, scale=2.446, has_layer_types=True, first_dense=1),
        ),
    ),
    "lfm2": replace(_LFM2, adjusts_width=True),
    "lfm2_moe": replace(
        _LFM2,
        fields={**_LFM2.fields, "num_dense_layers": "first_k_dense_replace"},
        experts=ExpertNames(
            "feed_forward",
            ("w1", "w3", "w2"),
            always_renormalises=False,
            intermediate_key="moe_intermediate_size",
            routing=RoutingRule(
                scoring="sigmoid", has_correction=True, renormalises=True, scale=1.0, first_dense=2, least=1e-6
            ),
        ),
    ),
    "llama": Family(mlp_bias=None, needs_kv_heads=False),
    "llama4_text": Family(
        default_theta=500_000.0,
        default_eps=1e-5,
        needs_kv_heads=False,
        head_dim=128,
        qk_norm="unit",
        has_unrotated_layers=True,
        has_query_growth=True,
        has_chunks=True,
        pairs_sides=True,
        mlp="feed_forward",
        mlp_width="intermediate_size_mlp",
        experts=ExpertNames(
            "feed_forward",
            ("gate_up_proj", "gate_up_proj", "down_proj"),
            always_renormalises=False,
            intermediate_key="intermediate_size",
            router="router",
            form="halves",
            shared="shared_expert",
            routing=RoutingRule(scoring="sigmoid", renormalises=None, has_moe_layers=True, weighs_inputs=True),
        ),
    ),
    "minicpm3": Family(
        mlp_bias=None,
        needs_kv_heads=False,
        default_eps=1e-5,
        has_depth_scales=True,
        is_tied=True,
        latent=LatentFamily(768, 256, 32, 64, None, "halves"),
    ),
    "mistral": Family(qkv_bias=False, o_bias=False, windows="all", default_window=4096),
    "mixtral": Family(
        qkv_bias=False,
        o_bias=False,
        windows="all",
        default_theta=1_000_000.0,
        default_eps=1e-5,
        experts=ExpertNames(
            "block_sparse_moe", ("w1", "w3", "w2"), always_renormalises=True, intermediate_key="intermediate_size"
        ),
    ),
    "nemotron_h": Family(
        mlp_bias=None,
        needs_kv_heads=False,
        head_dim=128,
        default_eps=1e-5,
        has_rope=False,
        has_single_parts=True,
        activation="relu2",
        activation_key="mlp_hidden_act",
        mlp="mixer",
        ignores="mtp.",
        fields={
            "layer_norm_epsilon": "rms_norm_eps",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_d_conv": "conv_kernel",
            "mamba_dt_limit": "time_step_limit",
            "mamba_n_groups": "n_groups",
        },
        stored_names={"input_layernorm": "norm", "post_attention_layernorm": "norm", "self_attn": "mixer"},
        recurrent=ScanFamily(heads=128, head_dim=64, groups=8, state_size=128, kernel=4),
        experts=ExpertNames(
            "mixer",
            ("", "up_proj", "down_proj"),
            always_renormalises=False,
            intermediate_key="moe_intermediate_size",
            shared="shared_experts",
            shared_key="moe_shared_expert_intermediate_size",
            latent_key="moe_latent_size",
            routing=_BY_TWO,
        ),
    ),
    "olmo2": Family(needs_kv_heads=False, qk_norm="whole", norms="after", default_eps=1e-5),
    "phi3": Family(
        qkv_bias=False,
        o_bias=False,
        needs_kv_heads=False,
        windows="all",
        default_eps=1e-5,
        has_partial_rope=True,
        is_fused=True,
    ),
    "qwen2": Family(qkv_bias=True, o_bias=False, windows="switched", default_window=4096),
    "qwen3": Family(qk_norm="head", head_dim=128, windows="switched", default_window=4096),
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        mlp_width="moe_intermediate_size",  # all layers have experts
        experts=ExpertNames(
            "mlp",
            _EACH,
            always_renormalises=True,
            intermediate_key="moe_intermediate_size",
            form="outputs_first",
            shared="shared_expert",
            shared_key="shared_expert_intermediate_size",
            shared_gate="shared_expert_gate",
        ),
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_moe": Family(
        qk_norm="head",
        windows="switched_all",
        default_window=4096,
        experts=ExpertNames(
            "mlp",
            ("gate_proj", "up_proj", "down_proj"),
            always_renormalises=False,
            intermediate_key="moe_intermediate_size",
        ),
    ),
    "qwen3_next": replace(
        _WITH_DELTA,
        experts=ExpertNames(
            "mlp",
            _EACH,
            always_renormalises=False,
            intermediate_key="moe_intermediate_size",
            shared="shared_expert",
            shared_key="shared_expert_intermediate_size",
            shared_gate="shared_expert_gate",
            routing=RoutingRule(renormalises=True),
        ),
    ),
    "youtu": Family(
        needs_kv_heads=False,
        is_tied=True,
        latent=LatentFamily(1536, 512, 64, 128, 128, "switched"),
    ),
}
