"""why_not_paged: what a model of the transformers library does that the paged arena cannot hold, in words for people.

A model is asked for what it is: its config's layer types and what the library's class says of itself. Knows no tensor.
"""

import sys
from typing import Any, Final

from .table import FAMILIES

_ATTENTION: Final = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
_KEEPS_NOTHING: Final = frozenset(("mlp", "moe"))
_ALIBI: Final = ("build_alibi_tensor", "build_mpt_alibi_tensor")  # names of the library's functions


def why_not_paged(config: Any, network_class: type) -> str:
    """Why a model of this config and this class of network cannot be paged; empty: no reason is known."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    others = [kind for kind in kinds if kind not in _ATTENTION | _KEEPS_NOTHING]
    if others or getattr(network_class, "_is_stateful", False):
        layers = f"{len(others)} of its {len(kinds)} layers keep" if others else "its layers keep"
        named = f" ({', '.join(sorted(set(others)))})" if others else ""
        ours = ", ".join(name for name, family in FAMILIES.items() if family.delta is not None)
        return f"{layers} a state of their own for each sequence{named}, which this engine computes for {ours} alone"
    module = sys.modules[network_class.__module__]
    says_alibi = getattr(config, "alibi", getattr(getattr(config, "attn_config", None), "alibi", True))
    if says_alibi and any(hasattr(module, name) for name in _ALIBI):
        return "it adds a bias by distance to attention scores (ALiBi), which this engine's attention does not have"
    return ""
