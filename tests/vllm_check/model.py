"""Writes a small Llama with random weights: `python model.py FOLDER`, in vLLM's environment. Nothing is fetched."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 2048


def main(folder: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.1,  # so large that a token that is lost shows in what follows
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
