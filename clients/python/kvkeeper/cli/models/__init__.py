"""Models that are made into folders which an engine serves: `convert`, and those that `up` and `serve` know by name.

Owns the conversion of GGUF files (gguf) and of their tokenizers (gguf_tokenizer), its command (convert), and which models
have names and where they come from (named). May import console and common; transformers, which brings torch, where a file is
converted.
"""
