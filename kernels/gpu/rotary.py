"""rotary on CUDA: up to _MOST_HEADS heads of one token a program; both halves of a head are read once."""

import torch
import triton
import triton.language as tl

from .sizes import cdiv, power_of_2, warps_for

_MOST_HEADS = 16  # of one program


@triton.jit
def rotate(a, b, cos_ptr, sin_ptr, token, HALF: tl.constexpr, COLS: tl.constexpr):
    """Halves a, b [n, COLS] of heads of one token, rotated; the tables' second half is (cos, sin)."""
    cols = tl.arange(0, COLS)
    row = token * (2 * HALF) + HALF + cols
    cos = tl.load(cos_ptr + row, mask=cols < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + row, mask=cols < HALF, other=0.0).to(tl.float32)[None, :]
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_stride,
    x_head_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    COLS: tl.constexpr,
):
    """HEADS heads of one token; x [T, NUM_HEADS, 2 * HALF] with strides, the tables and out contiguous."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, COLS)
    live = (heads < NUM_HEADS)[:, None] & (cols < HALF)[None, :]
    x_ptrs = x_ptr + token * x_stride + heads[:, None] * x_head_stride + cols[None, :]
    a, b = tl.load(x_ptrs, mask=live, other=0.0), tl.load(x_ptrs + HALF, mask=live, other=0.0)
    a, b = rotate(a, b, cos_ptr, sin_ptr, token, HALF, COLS)
    out_ptrs = out_ptr + (token * NUM_HEADS + heads)[:, None] * (2 * HALF) + cols[None, :]
    tl.store(out_ptrs, a.to(out_ptr.dtype.element_ty), mask=live)
    tl.store(out_ptrs + HALF, b.to(out_ptr.dtype.element_ty), mask=live)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The CUDA path of kernels.activations.rotary, with its arguments."""
    num_tokens, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    heads = min(power_of_2(num_heads), _MOST_HEADS)
    half = head_dim // 2
    rotary_kernel[num_tokens, cdiv(num_heads, heads)](
        x,
        cos,
        sin,
        out,
        x.stride(0),
        x.stride(1),
        NUM_HEADS=num_heads,
        HALF=half,
        HEADS=heads,
        COLS=(cols := power_of_2(half)),
        num_warps=warps_for(heads * cols),
    )
    return out
