"""rms_norm on CUDA: a row is read once, kept in registers, and written once; short rows share a program."""

import torch
import triton
import triton.language as tl

from .sizes import cdiv, power_of_2

_PROGRAM_ELEMENTS = 2048  # of short rows
_THREAD_ELEMENTS = 16


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_stride,
    x_head_stride,
    residual_stride,
    residual_head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    WEIGHT_PER_HEAD: tl.constexpr,
    LEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """ROWS rows of LEN elements; row r is head r % NUM_HEADS of token r // NUM_HEADS. With a residual, x becomes the sum."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    tokens, heads = rows // NUM_HEADS, rows % NUM_HEADS
    live = (rows < num_rows)[:, None] & (cols < LEN)[None, :]
    x_ptrs = x_ptr + (tokens * x_stride + heads * x_head_stride)[:, None] + cols[None, :]
    x = tl.load(x_ptrs, mask=live, other=0.0)
    if residual_ptr is not None:
        residual_rows = tokens * residual_stride + heads * residual_head_stride
        residual = tl.load(residual_ptr + residual_rows[:, None] + cols[None, :], mask=live, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptrs, x, mask=live)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / LEN + eps)
    if WEIGHT_PER_HEAD:
        weight = tl.load(weight_ptr + heads[:, None] * LEN + cols[None, :], mask=live, other=0.0)
    else:
        weight = tl.load(weight_ptr + cols, mask=cols < LEN, other=0.0)[None, :]
    normed = wide * scale[:, None] * weight.to(tl.float32)
    tl.store(out_ptr + rows[:, None] * LEN + cols[None, :], normed.to(out_ptr.dtype.element_ty), mask=live)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    """The CUDA path of kernels.activations.rms_norm, with its arguments; returns the normalised tensor."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    rows = _as_heads(x)
    num_tokens, num_heads, length = rows.shape
    added = rows if residual is None else _as_heads(residual)
    cols = power_of_2(length)
    rows_at_once = max(_PROGRAM_ELEMENTS // cols, 1)
    num_rows = num_tokens * num_heads
    rms_norm_kernel[(cdiv(num_rows, rows_at_once),)](
        rows,
        None if residual is None else added,
        weight,
        out,
        num_rows,
        rows.stride(0),
        rows.stride(1),
        added.stride(0),
        added.stride(1),
        eps,
        NUM_HEADS=num_heads,
        WEIGHT_PER_HEAD=weight.dim() == 2,
        LEN=length,
        ROWS=rows_at_once,
        COLS=cols,
        num_warps=min(max(rows_at_once * cols // (32 * _THREAD_ELEMENTS), 1), 16),
    )
    return out


def _as_heads(x: torch.Tensor) -> torch.Tensor:
    """[T, H, D], without a copy."""
    return x if x.dim() == 3 else x.view(-1, 1, x.shape[-1])
