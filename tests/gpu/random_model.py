"""Models with random weights, as Hugging Face folders without a tokenizer: nothing is downloaded.

Some have the shapes of real ones. Others are small, of families whose decodes are made of other kernels, with the head dims of
real ones: between them they have chunks in groups of layers, experts, latents, logits of sinks, windows in turn and soft caps.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvkeeper.engine_service.model.config import parse_model_config
from kvkeeper.engine_service.model.loading.weight_map import allocate_layer, allocate_rest
from kvkeeper.engine_service.model.split import WHOLE


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a decoder-only model with grouped-query attention and tied embeddings."""

    name: str
    model_type: str  # "llama" or "qwen3"
    vocab_size: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_parameters(self) -> int:
        """Of embeddings and projections; norms are left out."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.vocab_size * self.hidden + self.num_layers * (attention + 3 * self.hidden * self.intermediate)


LLAMA_1B = Shape("llama-3.2-1b-shape", "llama", 128_256, 2048, 8192, 16, 32, 8, 64)
QWEN3_06B = Shape("qwen3-0.6b-shape", "qwen3", 151_936, 1024, 3072, 28, 16, 8, 128)
TINY = Shape("tiny-shape", "llama", 512, 64, 128, 2, 4, 2, 16)

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


CHUNK = 64  # tokens, fewer than the contexts here
_COMMON = {
    "vocab_size": 512,
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


def write_model(folder: Path, shape: Shape, device: str) -> Path:
    """The folder of a model with weights drawn on the device, in bfloat16."""
    own = {
        "model_type": shape.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    return _write(folder / shape.name, _ARCHITECTURES[shape.model_type], own, device)


def write_family(folder: Path, name: str) -> Path:
    """The folder of one of FAMILIES, in bfloat16."""
    architecture, own = FAMILIES[name]
    return _write(folder / name, architecture, own | {"model_type": name})


def _write(path: Path, architecture: str, own: dict[str, Any], device: str = "cpu") -> Path:
    """Norms are about one; the rest is spread as far as keeps activations of order one."""
    path.mkdir()
    raw = _COMMON | own | {"architectures": [architecture]}
    (path / "config.json").write_text(json.dumps(raw))
    config, empty = parse_model_config(raw), partial(torch.empty, dtype=torch.bfloat16, device="meta")
    destinations = allocate_rest(config, WHOLE, empty)[1]
    for index in range(config.num_layers):
        destinations |= allocate_layer(config, WHOLE, index, empty)[1]
    drawn, tensors = torch.Generator(device).manual_seed(0), {}
    for stored, destination in destinations.items():
        shape = destination.shape
        spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        values = torch.randn(shape, generator=drawn, device=device) * spread
        is_norm = "norm" in stored and len(shape) == 1
        tensors[stored] = (values + (raw["model_type"] != "gemma2") if is_norm else values).bfloat16().cpu()
    save_file(tensors, path / "model.safetensors")
    return path
