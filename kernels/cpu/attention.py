"""paged_attention_decode, compiled: keys and values are read where they are, block by block."""

from dataclasses import dataclass

import torch

from .launch import Launcher

_ALL_KEYS = 1 << 62
_attend = Launcher("attend_decode", "q" * 14 + "ddqq")


@dataclass(frozen=True, slots=True)
class DirectDecode:
    """The block tables as the kernel reads them: int32 [S, max_blocks] and [S], proved to stay in the arena.

    num_keys: that all queries see together.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    window: int | None
    num_keys: int


def direct_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: DirectDecode,
    *,
    scale: float,
    soft_cap: float | None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q [S, num_heads, head_dim], float32, as paged_attention_decode does. A sequence that sees nothing gets zeros."""
    num_seqs, num_heads, size = q.shape
    _, _, block_size, num_kv_heads, _ = kv_layer.shape
    out = torch.empty(q.shape)
    _attend(
        plan.num_keys * num_heads * size,
        q.data_ptr(),
        q.stride(0),
        kv_layer.data_ptr(),
        kv_layer.stride(0),
        kv_layer.stride(1),
        plan.block_tables.data_ptr(),
        plan.block_tables.stride(0),
        plan.seq_lens.data_ptr(),
        plan.window or _ALL_KEYS,
        num_seqs,
        num_heads,
        num_kv_heads,
        size,
        block_size,
        float(scale),
        float(soft_cap or 0),
        out.data_ptr(),
        0 if sink_logits is None else sink_logits.data_ptr(),
    )
    return out
