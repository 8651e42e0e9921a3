"""DEFAULT_SIZES: what config.json leaves out of a text part, because it is the default of its type; by `model_type`."""

from collections.abc import Mapping
from typing import Final

_FIELDS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def _sizes(*sizes: int) -> Mapping[str, int]:
    return dict(zip(_FIELDS, sizes, strict=True))


DEFAULT_SIZES: Final[Mapping[str, Mapping[str, int]]] = {
    "deepseek_v3": _sizes(129280, 7168, 18432, 61, 128, 128, 4096),
    "gemma": _sizes(256000, 3072, 24576, 28, 16, 16, 8192),
    "gemma2": _sizes(256000, 2304, 9216, 26, 8, 4, 8192),
    "gemma3_text": _sizes(262208, 2304, 9216, 26, 8, 4, 131072),
    "granite": _sizes(32000, 4096, 11008, 32, 32, 32, 2048),
    "lfm2": _sizes(65536, 2560, 12288, 32, 32, 8, 128000),
    "llama": _sizes(32000, 4096, 11008, 32, 32, 32, 2048),
    "llama4_text": _sizes(202048, 5120, 8192, 48, 40, 8, 131072),
    "mistral": _sizes(32000, 4096, 14336, 32, 32, 8, 131072),
    "qwen2": _sizes(151936, 4096, 22016, 32, 32, 32, 32768),
    "qwen3": _sizes(151936, 4096, 22016, 32, 32, 32, 32768),
}
