"""store_kv on CUDA: one pass over the step's tokens, 16 bytes a thread and access, straight into their slots."""

import torch
import triton
import triton.language as tl

from .sizes import cdiv, power_of_2, warps_for
from .variants import MANY_STORED

_MOST_COLS = 1024  # elements of a slot that one program moves


@triton.jit(do_not_specialize=["num_tokens"])
def store_kv_kernel(
    k_ptr,
    v_ptr,
    layer_ptr,
    slot_ptr,
    num_tokens,
    k_stride,
    v_stride,
    block_stride,
    kv_stride,
    SLOT_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """ROWS tokens by COLS elements of their slots. Strides in elements."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    slots = tl.load(slot_ptr + rows, mask=rows < num_tokens, other=-1).to(tl.int64)
    live = (slots >= 0)[:, None] & (cols < SLOT_LEN)[None, :]
    rows = rows.to(tl.int64)
    k = tl.load(k_ptr + rows[:, None] * k_stride + cols[None, :], mask=live)
    v = tl.load(v_ptr + rows[:, None] * v_stride + cols[None, :], mask=live)
    targets = slots // BLOCK_SIZE * block_stride + slots % BLOCK_SIZE * SLOT_LEN
    target_ptrs = layer_ptr + targets[:, None] + cols[None, :]
    tl.store(target_ptrs, k, mask=live)
    tl.store(target_ptrs + kv_stride, v, mask=live)


def store_kv(k: torch.Tensor, v: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """The CUDA path of kernels.store_kv, with its arguments."""
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    _, _, block_size, num_kv_heads, head_dim = kv_layer.shape
    slot_len = num_kv_heads * head_dim
    cols = min(power_of_2(slot_len), _MOST_COLS)
    rows = 4 if num_tokens >= MANY_STORED else 1
    store_kv_kernel[cdiv(num_tokens, rows), cdiv(slot_len, cols)](
        k,
        v,
        kv_layer,
        slot_mapping,
        num_tokens,
        k.stride(0),
        v.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        SLOT_LEN=slot_len,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        COLS=cols,
        num_warps=warps_for(rows * cols),
    )
