"""How a GGUF file's tokenizer splits text and where it begins: transformers takes the vocabulary, and leaves both out.

A file names its way of splitting (tokenizer.ggml.pre), as llama.cpp's table has it (its src/llama-vocab.cpp). One that is not
named here is refused: other splits give other tokens, and nothing would say so.
"""

from pathlib import Path

from gguf import GGUFReader
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = "gpt2"  # the model of tokenizers whose pieces are bytes, which has a split
_GPT2 = ("gpt-2", "phi-2", "olmo")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_LLAMA_3, _QWEN = ("llama-bpe", "llama3", "llama-v3"), ("qwen2", "deepseek-r1-qwen")


class UnknownSplit(Exception):
    """A file's way of splitting text is not known here."""


def correct(tokenizer: Tokenizer, file: Path) -> None:
    """Makes the tokenizer split text and begin it as the file says. Raises UnknownSplit."""
    reader = GGUFReader(file)

    def field(name: str, default: object) -> object:
        found = reader.get_field(f"tokenizer.ggml.{name}")
        return default if found is None else found.contents()

    model = field("model", "")
    if model == _BYTES:
        _split(tokenizer, str(field("pre", "default")))
    begins = bool(field("add_bos_token", model == "llama"))
    bos = tokenizer.id_to_token(int(str(field("bos_token_id", -1)))) if begins else None
    if bos is not None:
        ids = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=ids
        )


def _split(tokenizer: Tokenizer, name: str) -> None:
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in _GPT2 + _DIGITS)
    if name in _GPT2:
        tokenizer.pre_tokenizer = in_bytes
    elif name in _DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), in_bytes])
    elif name in _LLAMA_3 + _QWEN:
        numbers = r"\p{N}{1,3}" if name in _LLAMA_3 else r"\p{N}"
        by_words = pre_tokenizers.Split(Regex(_WORDS + numbers + _SIGNS), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_words, in_bytes])
        tokenizer.model.ignore_merges = name in _LLAMA_3
        tokenizer.normalizer = normalizers.NFC() if name in _QWEN else None
    else:
        text = f"its tokenizer splits text as {name!r}, and {', '.join(_GPT2 + _DIGITS + _LLAMA_3 + _QWEN)} are known here"
        raise UnknownSplit(f"{text}; take the Hugging Face folder of the model")
