"""FAMILIES: every family that the decoder has, by the `model_type` of its config.json."""

from collections.abc import Mapping
from typing import Final

from .family import ExpertNames, Family

FAMILIES: Final[Mapping[str, Family]] = {
    "gemma": Family(is_gemma=True, head_dim=256),
    "gemma2": Family(
        is_gemma=True,
        head_dim=256,
        windows="in_turn",
        default_window=4096,
        full_every=2,
        query_scalar=256,
        soft_caps=(50.0, 30.0),
        norms="both",
    ),
    "gemma3_text": Family(
        is_gemma=True,
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
        has_clamped_swiglu=True,
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
    "llama": Family(mlp_bias=None, needs_kv_heads=False),
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
}
