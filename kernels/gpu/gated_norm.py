"""gated_norm on CUDA: several heads a program, each read once."""

import torch
import triton
import triton.language as tl

from .sizes import cdiv, power_of_2

_PROGRAM_ELEMENTS = 2048


@triton.jit(do_not_specialize=["num_heads"])
def gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_heads,
    gate_stride,
    eps,
    TOKEN_HEADS: tl.constexpr,
    LEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    IS_BEHIND: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
):
    """ROWS heads of LEN elements; head h is of token h // TOKEN_HEADS. num_heads: of all tokens.

    IS_BEHIND: weights [TOKEN_HEADS, LEN], of the norm of what is gated. IS_SIGMOID: the gate's sigmoid, not its silu.
    """
    heads, cols = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    live = (heads < num_heads)[:, None] & (cols < LEN)[None, :]
    at = heads[:, None] * LEN + cols[None, :]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    gate_at = (heads // TOKEN_HEADS * gate_stride + heads % TOKEN_HEADS * LEN)[:, None] + cols[None, :]
    gate = tl.load(gate_ptr + gate_at, mask=live, other=0.0).to(tl.float32)
    if IS_BEHIND:
        x = x * (gate / (1.0 + tl.exp(-gate)))
        weight = tl.load(weight_ptr + (heads % TOKEN_HEADS * LEN)[:, None] + cols[None, :], mask=live, other=0.0).to(tl.float32)
        gated = x * tl.rsqrt(tl.sum(x * x, 1) / LEN + eps)[:, None] * weight
    else:
        weight = tl.load(weight_ptr + cols, mask=cols < LEN, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / LEN + eps)
        weighed = x * scale[:, None] * weight[None, :]
        if IS_SIGMOID:
            gated = weighed / (1.0 + tl.exp(-gate))
        else:
            gated = weighed * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + at, gated.to(out_ptr.dtype.element_ty), mask=live)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, is_sigmoid: bool = False
) -> torch.Tensor:
    """The CUDA path of kernels.recurrent.gated_norm, with its arguments."""
    num_tokens, num_heads, length = x.shape
    out = torch.empty((num_tokens, num_heads * length), dtype=x.dtype, device=x.device)
    cols = power_of_2(length)
    rows_at_once = max(_PROGRAM_ELEMENTS // cols, 1)
    if num_tokens:
        gated_norm_kernel[(cdiv(num_tokens * num_heads, rows_at_once),)](
            x,
            gate,
            weight,
            out,
            num_tokens * num_heads,
            gate.stride(0),
            eps,
            TOKEN_HEADS=num_heads,
            LEN=length,
            ROWS=rows_at_once,
            COLS=cols,
            IS_BEHIND=weight.dim() == 2,
            IS_SIGMOID=is_sigmoid,
            num_warps=4,
        )
    return out
