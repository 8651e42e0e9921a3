"""Logits of a model that attends to sinks and a window, worked out token by token from transformers' own weights.

The other way round than the engine does it: keys are kept as they are before rotation, and at every token those that are left
are numbered from 0 and rotated at these places, the query at the last. Dense, float32, one head after another.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers


def load_network(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


@torch.no_grad()
def within_cache_logits(network: Any, tokens: Sequence[int], num_sink: int, num_window: int) -> torch.Tensor:
    """[T, vocab_size]. For families with layers of norm, attention, sum, norm, MLP, sum, without windows of their own."""
    config = network.config
    frequencies = network.model.rotary_emb.inv_freq.double()
    caches: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in network.model.layers]
    rows = []
    for position, token in enumerate(tokens):
        seen = [j for j in range(position + 1) if j < num_sink or j > position - num_window]
        x = network.model.embed_tokens(torch.tensor([token]))
        for layer, cache in zip(network.model.layers, caches, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q = _heads(attention.q_proj(normed), config.num_attention_heads, getattr(attention, "q_norm", None))
            k = _heads(attention.k_proj(normed), config.num_key_value_heads, getattr(attention, "k_norm", None))
            v = _heads(attention.v_proj(normed), config.num_key_value_heads, None)
            cache.append((k, v))
            kept = [cache[j] for j in seen]
            turned = frequencies * getattr(attention, "use_rope", 1)
            x = x + attention.o_proj(_attend(q, kept, turned, attention.scaling).flatten()[None])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        rows.append(network.lm_head(network.model.norm(x))[0])
    return torch.stack(rows)


def _heads(projected: torch.Tensor, num_heads: int, norm: Any) -> torch.Tensor:
    """[num_heads, head_dim] of [1, num_heads * head_dim]."""
    heads = projected.view(num_heads, -1)
    return heads if norm is None else norm(heads)


def _attend(
    q: torch.Tensor, kept: list[tuple[torch.Tensor, torch.Tensor]], frequencies: torch.Tensor, scale: float
) -> torch.Tensor:
    """[num_heads, head_dim]; the keys that are left stand at 0, 1, 2 and so on, the query at the last of them."""
    places = torch.arange(len(kept))[:, None, None]
    keys = _rotate(torch.stack([k for k, _ in kept]), places, frequencies)
    values = torch.stack([v for _, v in kept])
    q = _rotate(q, places[-1], frequencies)
    out = []
    for head, query in enumerate(q):
        group = head * keys.shape[1] // len(q)
        weights = torch.softmax(keys[:, group] @ query * scale, dim=0)
        out.append(weights @ values[:, group])
    return torch.stack(out)


def _rotate(heads: torch.Tensor, places: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    angles = places * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = heads.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
