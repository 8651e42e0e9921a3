"""The model of the engine's figures: a random Llama of 32 M parameters, float32, in a Hugging Face folder without tokenizer."""

import contextlib
import io
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 8192
_CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    initializer_range=0.05,
    bos_token_id=1,
    eos_token_id=2,
)


def build_folder(folder: Path) -> LlamaForCausalLM:
    """Write the model, and answer it as transformers runs it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(_CONFIG).eval()
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
