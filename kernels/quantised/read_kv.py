"""read_kv: K and V of tokens as numbers, from the tail's pages or from stored blocks, in plain torch.

Owns what "the tail has it" means: the entry of the tail's table is not the null block. All ops on stored K and V follow it.
"""

import torch

from .formats import dequantise
from .layout import QuantisedLayer


def read_kv(
    layer: QuantisedLayer,
    block_table: torch.Tensor,
    tail_table: torch.Tensor | None,
    positions: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, [T, num_kv_heads, head_dim] of `dtype`, of the tokens at `positions`.

    Args:
        block_table: [max_blocks] of stored blocks.
        tail_table: [max_blocks] of pages, 0 where there is none; None: there is no tail.
        positions: int64 [T].
    """
    layout = layer.layout
    entries, offsets = positions // layout.block_size, positions % layout.block_size
    blocks = block_table[entries].long()
    elements = layer.elements[blocks, :, offsets]  # [T, 2, num_kv_heads, row_bytes]
    scales = layer.scales[blocks, :, offsets] if layout.kv_format.scale_bytes else layer.scales
    kv = dequantise(elements, scales, layout.kv_format, dtype)
    if tail_table is not None and layer.tail is not None:
        pages = tail_table[entries].long()
        there = pages != 0
        kv[there] = layer.tail[pages[there], :, offsets[there]].to(dtype)
    return kv[:, 0], kv[:, 1]
