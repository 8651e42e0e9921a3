"""Models of families whose decodes are made of other kernels, small and random, but with the head dims of real ones.

Between them they have chunks in groups of layers, experts, latents, logits of sinks, windows in turn and soft caps.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvkeeper.engine_service.model.config import parse_model_config
from kvkeeper.engine_service.model.weight_map import allocate_weights

VOCAB_SIZE = 512
CHUNK = 64  # tokens, fewer than the contexts here
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4_text": (
        "Llama4ForCausalLM",
        _EXPERTS | {"head_dim": 128, "attention_chunk_size": CHUNK, "intermediate_size_mlp": 512, "use_qk_norm": True},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        _EXPERTS | {"head_dim": 64, "sliding_window": 96, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "head_dim": 256,
            "sliding_window": 96,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "kv_lora_rank": 512,
            "q_lora_rank": 128,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "num_key_value_heads": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
}


def write_family(folder: Path, name: str) -> Path:
    """The folder of a model with random weights in bfloat16."""
    path = folder / name
    path.mkdir()
    architecture, own = FAMILIES[name]
    raw = _COMMON | {"model_type": name, "architectures": [architecture]} | own
    (path / "config.json").write_text(json.dumps(raw))
    _, destinations = allocate_weights(parse_model_config(raw), torch.bfloat16, torch.device("cpu"))
    drawn = torch.Generator().manual_seed(0)
    tensors = {}
    for stored, destination in destinations.items():
        shape = destination.shape
        is_norm = "norm" in stored and len(shape) == 1
        spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        values = torch.randn(shape, generator=drawn) * spread
        tensors[stored] = (values + (name != "gemma2") if is_norm else values).bfloat16()
    save_file(tensors, path / "model.safetensors")
    return path
