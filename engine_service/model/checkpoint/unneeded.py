"""unneeded: the tensors of a checkpoint that are left out when it is read, by name, each with its reason.

No other tensor is left out: what is stored is used, or the checkpoint is refused.
"""

import re
from collections.abc import Callable, Collection
from typing import Final

from .text_part import find_layer

HEAD: Final = "lm_head."
EMBEDDINGS: Final = "model.embed_tokens."
_FREQUENCIES: Final = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_FURTHER: Final = re.compile(r"model\.layers\.\d{1,9}\.eh_proj\.")  # joins the embedding of a further token to a hidden state
_KV: Final = re.compile(r"model\.layers\.\d{1,9}\.self_attn\.[kv]_(proj|norm)\.")
_ROUNDING: Final = frozenset(
    ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale", "prob_scale")
)


def unneeded(
    names: Collection[str],
    *,
    num_layers: int,
    num_kv_layers: int,
    has_later_layers: bool,
    of_further_tokens: str,
    part_of: Callable[[str], str] | None,
) -> dict[str, str]:
    """The names of the tensors that are left out, each with the reason.

    Args:
        num_kv_layers: layers that store K and V, which come first.
        has_later_layers: whether layers behind the last one may predict further tokens.
        of_further_tokens: what the names of tensors begin with that do so by themselves; empty: there are none.
        part_of: of a quantised checkpoint, which part of a stored weight a tensor of this name is.
    """
    found = {name: "follows from config.json" for name in names if _FREQUENCIES.fullmatch(name)}
    if num_kv_layers < num_layers:
        reason, sharing = "its layer reads the K and V of another one", range(num_kv_layers, num_layers)
        found |= {name: reason for name in names if _KV.match(name) and find_layer(name) in sharing}
    if of_further_tokens:
        found |= {name: "predicts further tokens" for name in names if name.startswith(of_further_tokens)}
    if has_later_layers:
        further = {find_layer(name) for name in names if _FURTHER.match(name)} - {*range(num_layers)}
        found |= {name: "predicts further tokens" for name in names if find_layer(name) in further}
    if part_of is not None:
        reason = "says how a server may round what it computes; here nothing is rounded so"
        found |= {name: reason for name in names if part_of(name) in _ROUNDING}
    return found
