"""Any architecture of language model that transformers knows, tiny and random, in a folder; docs/operate/models.md has them."""

from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.support.models.tiny_models import quiet_transformers

VOCAB_SIZE = 96
MAX_POSITION = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,
    "max_position_embeddings": MAX_POSITION,
    "sliding_window": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}

_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 12,
    "head_dim": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "shared_expert_intermediate_size": 16,
    "rms_norm_eps": 0.01,  # see tiny_models.py
}
_KIMI_DELTA = {
    **{name: size for name, size in _LATENT.items() if name not in ("q_lora_rank", "index_head_dim", "index_n_heads")},
    "kv_lora_rank": 56,
    "linear_head_dim": 4,
    "linear_num_heads": 4,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 0.01,
}
_SHARING = {
    "num_hidden_layers": 10,
    "num_kv_shared_layers": 5,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_expand": 2}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}

# What an architecture needs beside the common tiny config, or instead of it (None: take the key away).
_OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": _KIMI_DELTA | {"layer_group_size": 2},
    "bamba": _SSM,
    "blenderbot": {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "head_dim": 8,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "doge": {"sliding_window": None},
    "olmoe": {"sliding_window": None},
    "phimoe": {"sliding_window": None},
    "dots1": {"moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "falcon": {"head_dim": None},
    "falcon_h1": {**_SSM, "mamba_d_ssm": 64},
    "gemma3": {"text_config": _COMMON, "vision_config": _VISION},
    # As released: heads of full layers are twice as long, and the last layers have no K and V of their own.
    "gemma3n_text": _SHARING | {"laurel_rank": 4},
    "gemma4_text": _SHARING | {"global_head_dim": 16, "hidden_size_per_layer_input": 12},
    "gemma4_unified_text": {"global_head_dim": 16},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt_oss": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": _SSM,
    "kimi_linear": _KIMI_DELTA | {"layer_types": ["linear_attention", "full_attention"]},
    "kolibri1": {"sliding_window": 9},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"attention_chunk_size": 32},
    "longcat_flash": _LATENT,
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_head_dim": 8,
        "index_n_heads": 2,
    },
    "modernbert-decoder": {"local_attention": 16},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 2,
        "n_groups": 2,
        "ssm_state_size": 4,
        "moe_shared_expert_intermediate_size": 16,
        "layer_norm_epsilon": 0.01,
    },
    "phi3": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32},
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 1, "num_decoder_layers": 2},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 16), "is_encoder_decoder": False},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20, "enable_pronunciation": False, "enable_shape": False},
    "whisper": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "xlnet": {"max_position_embeddings": None, "d_head": 8},
    "youtu": _LATENT,
    "zamba2": {"num_hidden_layers": 54},
}


def build_architecture(model_type: str, folder: Path, **changes: Any) -> Path:
    """Write config.json, with these changes, and safetensors. Biases and norms are random too, so that losing one shows."""
    wanted = {**_COMMON, **_OVERRIDES.get(model_type, {}), **changes}
    config = CONFIG_MAPPING[model_type](**{key: value for key, value in wanted.items() if value is not None})
    network_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    torch.manual_seed(0)
    with quiet_transformers():
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in network_class(config).parameters())
        assert size < 5_000_000, f"{size} parameters are not tiny"
        network = network_class(config)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.1)
                elif name.endswith("q_norm.weight") and model_type.startswith("gemma4"):  # the factor of its scores is in it
                    parameter.normal_(0.15, 0.03)
                elif "norm" in name:
                    parameter.normal_(1, 0.1)
        network.save_pretrained(folder)
    return folder
