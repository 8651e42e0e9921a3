"""What a config.json says of Kimi Delta Attention, as it is released and as the library writes it, and what is refused."""

from typing import Any

import pytest

from kvkeeper.engine_service.model.checkpoint.errors import ModelError
from kvkeeper.engine_service.model.checkpoint.text_part import text_name
from kvkeeper.engine_service.model.config import ModelConfig, parse_model_config
from kvkeeper.engine_service.model.recurrent.kimi_delta_config import KimiDeltaShape

# As moonshotai/Kimi-Linear-48B-A3B-Instruct has it, but for what the text is about.
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "head_dim": 72,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "model_max_length": 1048576,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 1024,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
}
# The same of Ling 3, of as few layers as show its pattern.
LING: dict[str, Any] = {
    "model_type": "bailing_hybrid",
    "vocab_size": 157184,
    "hidden_size": 2560,
    "head_dim": 128,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.5,
    "gated_attention_proj_granularity_type": "head_wise",
    "no_kda_lora": True,
    "moe_intermediate_size": 768,
    "moe_router_enable_expert_bias": True,
    "num_experts": 512,
    "num_experts_per_tok": 8,
    "score_function": "sigmoid",
}


def parse(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config(raw | changes)


def test_a_released_kimi_linear_is_read() -> None:
    config = parse(KIMI)
    assert config.recurrent is not None and config.latent is not None and config.experts is not None
    assert config.recurrent.shape == KimiDeltaShape(32, 128, 4, 128, None)
    assert sorted(set(range(27)) - config.recurrent.layers) == [3, 7, 11, 15, 19, 23, 26]
    assert config.latent.query_rank is None and not config.latent.has_head_gates
    assert config.unrotated == set(range(27))
    assert config.experts.layers == set(range(1, 27))
    assert (config.experts.shared_size, config.experts.routing.num_chosen, config.max_position) == (1024, 8, 1048576)


def test_a_config_of_ling_that_says_little_means_what_the_family_has() -> None:
    config = parse(LING)
    assert config.recurrent is not None and config.latent is not None and config.experts is not None
    assert config.recurrent.shape == KimiDeltaShape(32, 128, 4, 0, -5.0)
    assert sorted(set(range(12)) - config.recurrent.layers) == [5, 11]
    assert config.latent.has_head_gates and config.latent.are_sides and config.rope.part == 1.0
    assert config.experts.layers == set(range(2, 12))
    assert (config.experts.routing.num_groups, config.experts.routing.num_chosen_groups) == (8, 4)


def test_what_is_said_counts() -> None:
    changes = {"kda_safe_gate": False, "layer_group_size": 3, "short_conv_kernel_size": 3, "linear_head_dim": 16}
    config = parse(LING, mlp_layer_types=["sparse"] * 12, **changes)
    assert config.recurrent is not None and config.experts is not None
    assert config.recurrent.shape == KimiDeltaShape(32, 16, 3, 0, None)
    assert len(config.recurrent.layers) == 8
    assert len(config.experts.layers) == 12
    bounded = parse(LING, kda_lower_bound=-2).recurrent
    assert bounded is not None and bounded.shape == KimiDeltaShape(32, 128, 4, 0, -2.0)


INNER = KIMI["linear_attn_config"]


@pytest.mark.parametrize(
    ("raw", "changes", "words"),
    [
        (KIMI, {"mla_use_nope": False}, "mla_use_nope False is not supported; supported: True"),
        (KIMI, {"moe_router_activation_func": "softmax"}, "scoring_func 'softmax'"),
        (KIMI, {"linear_attn_config": [1]}, "linear_attn_config must be an object"),
        (KIMI, {"linear_attn_config": INNER | {"full_attn_layers": [0]}}, "must be a list of layers from 1 to 27"),
        (KIMI, {"linear_attn_config": INNER | {"full_attn_layers": [28]}}, "must be a list of layers from 1 to 27"),
        (KIMI, {"linear_attn_config": INNER | {"full_attn_layers": "4"}}, "full_attn_layers must be a list of layers"),
        (KIMI, {"linear_attn_config": INNER | {"short_conv_kernel_size": 1}}, "linear_conv_kernel_dim must be 2 or more"),
        (LING, {"kda_lower_bound": 0}, "kda_lower_bound must be a number from -80 to below 0, is 0"),
        (LING, {"no_kda_lora": False}, "no_kda_lora False"),
        (LING, {"gated_attention_proj_granularity_type": "element_wise"}, "granularity_type 'element_wise'"),
        (LING, {"layer_group_size": 13}, "models with a layer of full attention"),
    ],
)
def test_what_cannot_be_is_refused(raw: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse(raw, **changes)


def test_tensors_have_one_name_in_either_spelling() -> None:
    assert text_name("model.word_embeddings.weight") == "model.embed_tokens.weight"
    assert text_name("model.layers.0.block_sparse_moe.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert text_name("model.layers.1.block_sparse_moe.experts.0.w1.weight").endswith("block_sparse_moe.experts.0.w1.weight")
