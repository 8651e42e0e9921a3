"""The text model of a checkpoint that holds other models beside it: its config, and its tensors by the names that it has alone.

Released files wrap their text model: config.json has it as `text_config`, and its tensors have a prefix; towers that read
pictures or sound lie beside it. All that read config.json read it here, so that they see the text model whatever it lies in.
A few settings stand outside alone; where both speak, the outer one counts, as in transformers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .json_file import CONFIG_FILE, read_json_object

WRAPPER: Final = "wrapped_in"  # the field of a text model's config for the type of what it is a part of; none: it stands alone
_OUTER: Final = ("architectures", "eos_token_id", "quantization_config", "tie_word_embeddings")
_DTYPES: Final = ("dtype", "torch_dtype")

# Text models that differ from another type in how pictures come in, or in nothing, by their own type.
_READ_AS: Final = {
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
# Types whose releases have the text model's settings outside, among those of other parts.
_FLAT: Final = {"qwen2_5_vl": "qwen2_5_vl_text", "qwen2_vl": "qwen2_vl_text"}

# Types whose text part is not served alone, and why.
WHOLE: Final = {"paligemma": "tokens of its prompts read later ones, too"}

_PREFIX: Final = r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?"
_TEXT: Final = re.compile(rf"(?:{_PREFIX})(?:backbone\.)?|backbone\.|model\.(?=word_embeddings\.)")
TO_TEXT_NAMES: Final = {rf"^{_PREFIX}lm_head\.": "lm_head.", f"^{_PREFIX}": "model."}  # as patterns and what replaces them
_SPELT: Final = {"embeddings.": "embed_tokens.", "norm_f.": "norm.", "word_embeddings.": "embed_tokens."}  # of what is within
_LIKE_EXPERTS: Final = re.compile(r"(?<=\.)block_sparse_moe\.(?=(?:gate|up|down)_proj\.)")  # an MLP, as the library writes it
_PART: Final = re.compile(r"(?:model\.)?([^.]+)")
_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")
_TEXT_PARTS: Final = frozenset(("embed_tokens", "embedding_norm", "layers", "lm_head", "norm", "rotary_emb"))


def read_text_config(folder: Path) -> dict[str, Any]:
    """The config of the text model in `folder`. Raises ModelFileMissingError, ModelConfigError."""
    return unwrap(read_json_object(folder / CONFIG_FILE))


def unwrap(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model from the object of a config.json; with WRAPPER, where that describes more than it."""
    said, inner = raw.get("model_type"), raw.get("text_config")
    wrapper = said if isinstance(said, str) else "a larger model"
    if wrapper in WHOLE:
        return dict(raw)
    if wrapper in _FLAT and not isinstance(inner, dict):
        inner = {**raw, "model_type": _FLAT[wrapper]}
    if not isinstance(inner, dict) or not isinstance(inner.get("model_type"), str):
        return dict(raw)
    found = {**inner, "model_type": _READ_AS.get(inner["model_type"], inner["model_type"])}
    found |= {key: raw[key] for key in _OUTER if raw.get(key) is not None}
    stated = [each[key] for each in (raw, inner) for key in _DTYPES if each.get(key) is not None]
    return found | {WRAPPER: wrapper, **dict.fromkeys(_DTYPES, stated[0] if stated else None)}


def lacks_type(raw: Mapping[str, Any]) -> bool:
    """Whether a config that was not unwrapped has a text model in it, and does not name that one's type."""
    inner = raw.get("text_config")
    return isinstance(inner, dict) and not isinstance(inner.get("model_type"), str)


def text_name(name: str) -> str:
    """The name of a stored tensor in the text model alone; that of any other as it is."""
    name, prefix = _LIKE_EXPERTS.sub("mlp.", name), _TEXT.match(name)
    if prefix is None:
        return name
    own = name[prefix.end() :]
    spelt = next((other for other in _SPELT if own.startswith(other)), "")
    own = _SPELT.get(spelt, "") + own.removeprefix(spelt)
    return own if own.startswith("lm_head.") else f"model.{own}"


def find_layer(name: str) -> int | None:
    """The number of the layer that a tensor of the text model belongs to; None: it belongs to none."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def other_part(name: str) -> str:
    """The part of a checkpoint that a stored tensor of no text model belongs to; empty: a text model has such a tensor."""
    part = _PART.match(name)
    if part is None or _TEXT.match(name) or part[1] in _TEXT_PARTS:
        return ""
    return part[0]
