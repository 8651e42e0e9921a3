"""rotary_store_kv on CUDA: queries and keys are normalised and rotated, keys and values stored, while they are read once."""

import math

import torch
import triton
import triton.language as tl

from .rotary import rotate
from .sizes import power_of_2, warps_for

_MOST_HEADS = 16  # of one program


@triton.jit
def _normed(a, b, weight_ptrs, live, eps, HALF: tl.constexpr):
    """Halves a, b [n, COLS] of heads, divided by their root mean square and weighted, in the type they came in."""
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    scale = tl.rsqrt((tl.sum(wide_a * wide_a, 1) + tl.sum(wide_b * wide_b, 1)) / (2 * HALF) + eps)[:, None]
    weight_a = tl.load(weight_ptrs, mask=live, other=0.0).to(tl.float32)
    weight_b = tl.load(weight_ptrs + HALF, mask=live, other=0.0).to(tl.float32)
    return (wide_a * scale * weight_a).to(a.dtype), (wide_b * scale * weight_b).to(b.dtype)


@triton.jit
def rotary_store_kv_kernel(
    qk_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    layer_ptr,
    slot_ptr,
    norm_ptr,
    qk_stride,
    qk_head_stride,
    v_stride,
    v_head_stride,
    block_stride,
    kv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    COLS: tl.constexpr,
):
    """HEADS heads of one token, all of them queries, keys or values: HEADS divides the number of each.

    norm: the weight of every query and key head [NUM_HEADS + NUM_KV_HEADS, 2 * HALF], or None. Normalised heads are rounded
    before they are rotated, as they are where the norm is a pass of its own.
    """
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if first_head >= NUM_HEADS and slot < 0:
        return
    heads = tl.arange(0, HEADS)
    cols = tl.arange(0, COLS)
    live = (cols < HALF)[None, :]
    # Where a head lies in a dense token of its kind.
    dense = heads[:, None] * (2 * HALF) + cols[None, :]
    slot_ptrs = layer_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (NUM_KV_HEADS * 2 * HALF) + dense
    if first_head >= NUM_HEADS + NUM_KV_HEADS:
        first_head -= NUM_HEADS + NUM_KV_HEADS
        v_ptrs = v_ptr + token * v_stride + (first_head + heads)[:, None] * v_head_stride + cols[None, :]
        target_ptrs = slot_ptrs + kv_stride + first_head * (2 * HALF)
        tl.store(target_ptrs, tl.load(v_ptrs, mask=live), mask=live)
        tl.store(target_ptrs + HALF, tl.load(v_ptrs + HALF, mask=live), mask=live)
    else:
        x_ptrs = qk_ptr + token * qk_stride + (first_head + heads)[:, None] * qk_head_stride + cols[None, :]
        a, b = tl.load(x_ptrs, mask=live, other=0.0), tl.load(x_ptrs + HALF, mask=live, other=0.0)
        if norm_ptr is not None:
            a, b = _normed(a, b, norm_ptr + first_head * (2 * HALF) + dense, live, eps, HALF)
        a, b = rotate(a, b, cos_ptr, sin_ptr, token, HALF, COLS)
        a, b = a.to(q_out_ptr.dtype.element_ty), b.to(q_out_ptr.dtype.element_ty)
        if first_head < NUM_HEADS:
            out_ptrs = q_out_ptr + (token * NUM_HEADS + first_head) * (2 * HALF) + dense
            tl.store(out_ptrs, a, mask=live)
            tl.store(out_ptrs + HALF, b, mask=live)
        else:
            target_ptrs = slot_ptrs + (first_head - NUM_HEADS) * (2 * HALF)
            tl.store(target_ptrs, a, mask=live)
            tl.store(target_ptrs + HALF, b, mask=live)


def rotary_store_kv(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
) -> torch.Tensor:
    """The CUDA path of kernels.rotary_store_kv, with its arguments."""
    num_tokens, num_kv_heads, head_dim = v.shape
    num_heads = qk.shape[1] - num_kv_heads
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qk.dtype, device=qk.device)
    if num_tokens == 0:
        return q
    heads = math.gcd(num_heads, num_kv_heads, _MOST_HEADS)
    half = head_dim // 2
    weight, eps = norm or (None, 0.0)
    rotary_store_kv_kernel[num_tokens, (num_heads + 2 * num_kv_heads) // heads](
        qk,
        v,
        cos,
        sin,
        q,
        kv_layer,
        slot_mapping,
        weight,
        qk.stride(0),
        qk.stride(1),
        v.stride(0),
        v.stride(1),
        kv_layer.stride(0),
        kv_layer.stride(1),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        BLOCK_SIZE=kv_layer.shape[2],
        HEADS=heads,
        COLS=(cols := power_of_2(half)),
        num_warps=warps_for(heads * cols),
    )
    return q
