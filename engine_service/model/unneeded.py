"""unneeded: the tensors of a checkpoint that the decoder leaves out, by name, each with its reason.

No other tensor is left out: what is stored is used, or the checkpoint is refused.
"""

import re
from collections.abc import Collection
from typing import Final

from .config import ModelConfig
from .families.table import FAMILIES

HEAD: Final = "lm_head."
EMBEDDINGS: Final = "model.embed_tokens."
_FREQUENCIES: Final = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_FURTHER: Final = re.compile(r"model\.layers\.(\d+)\.eh_proj\.")  # joins the embedding of a further token to a hidden state
_ROUNDING: Final = frozenset(
    ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale", "prob_scale")
)


def unneeded(config: ModelConfig, names: Collection[str], *, is_first: bool = True) -> dict[str, str]:
    """Of the tensors of these names, those that are left out, with the reason.

    is_first: whether the rank is the first one, which gives the logits.
    """
    family = FAMILIES[config.family]
    found = {name: "follows from config.json" for name in names if _FREQUENCIES.fullmatch(name)}
    if family.ignores:
        found |= {name: "predicts further tokens" for name in names if name.startswith(family.ignores)}
    if family.ignores_later_layers:
        further = {match[1] for match in map(_FURTHER.match, names) if match and int(match[1]) >= config.num_layers}
        found |= {name: "predicts further tokens" for name in names if (of := _LAYER.match(name)) and of[1] in further}
    if config.scheme is not None:
        reason = "says how a server may round what it computes; here nothing is rounded so"
        found |= {name: reason for name in names if config.scheme.split_name(name)[1] in _ROUNDING}
    if not is_first and any(name.startswith(EMBEDDINGS) for name in names):
        found |= {name: "is the first rank's" for name in names if name.startswith(HEAD)}
    return found
