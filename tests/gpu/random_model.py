"""Models with random weights in the shapes of real ones, as Hugging Face folders without a tokenizer: nothing is downloaded."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


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


def write_model(folder: Path, shape: Shape, device: str) -> Path:
    """The folder of a model with weights drawn on the device, in bfloat16."""
    path = folder / shape.name
    path.mkdir()
    config = {
        "architectures": [_ARCHITECTURES[shape.model_type]],
        "model_type": shape.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    save_file({name: _drawn(size, device) for name, size in _sizes(shape).items()}, path / "model.safetensors")
    return path


def _drawn(size: tuple[int, ...], device: str) -> torch.Tensor:
    """Norms are ones; the rest is spread as far as keeps activations of order one."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    weights = torch.empty(size, dtype=torch.bfloat16, device=device)
    return weights.normal_(std=size[1] ** -0.5).cpu()


def _sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (shape.hidden,),
        "post_attention_layernorm": (shape.hidden,),
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "mlp.gate_proj": (shape.intermediate, shape.hidden),
        "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }
    if shape.model_type == "qwen3":
        layer |= {"self_attn.q_norm": (shape.head_dim,), "self_attn.k_norm": (shape.head_dim,)}
    for index in range(shape.num_layers):
        sizes |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
    return sizes
