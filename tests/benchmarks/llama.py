"""The models of the engine's figures: random Llamas, float32, each in a Hugging Face folder without tokenizer.

That of 32 M parameters is the usual one.
"""

import contextlib
import io
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 8192


def _config(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=2,
    )


_CONFIGS = {"32m": _config(512, 1408, 8, 8), "158m": _config(1024, 2816, 12, 16)}
SIZES = tuple(_CONFIGS)


def build_folder(folder: Path, size: str = "32m") -> LlamaForCausalLM:
    """Write the model of one of SIZES, and answer it as transformers runs it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(_CONFIGS[size]).eval()
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        model.save_pretrained(folder)
    return model


def random_prompt(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """int32 [num_tokens], no special ones among them."""
    return rng.integers(3, VOCAB_SIZE, num_tokens).astype(np.int32)


def generate(model: torch.nn.Module, prompts: list[np.ndarray], num_new: int) -> None:
    """transformers' own greedy loop on one padded batch, num_new tokens each."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, do_sample=False, max_new_tokens=num_new, min_new_tokens=num_new, pad_token_id=0
        )
