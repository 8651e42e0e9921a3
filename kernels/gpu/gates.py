"""silu_and_mul, gelu_and_mul and clamped_swiglu on CUDA: one pass, 16 bytes a thread and access."""

import torch
import triton
import triton.language as tl

from .sizes import cdiv, power_of_2, warps_for

_MOST_COLS = 2048


@triton.jit
def gate_kernel(
    gate_up_ptr,
    out_ptr,
    stride,
    alpha,
    limit,
    LEN: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPED: tl.constexpr,
    COLS: tl.constexpr,
):
    """COLS elements of one row [2 * LEN]: gate first. alpha and limit: of clamped_swiglu."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = cols < LEN
    gate = tl.load(gate_up_ptr + row * stride + cols, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + LEN + cols, mask=live, other=0.0).to(tl.float32)
    # Both are gate times a sigmoid, by exp2: (1 + tanh(u)) / 2 is the sigmoid of 2 u.
    if GELU:
        bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi) (...)
    elif CLAMPED:  # in this form, so that what is not a number stays so
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up) + 1.0
        bent = gate * alpha
    else:
        bent = gate
    gated = gate / (1.0 + tl.exp2(bent * -1.4426950408889634)) * up
    tl.store(out_ptr + row * LEN + cols, gated.to(out_ptr.dtype.element_ty), mask=live)


def gate(gate_up: torch.Tensor, *, gelu: bool, swiglu: tuple[float, float] | None = None) -> torch.Tensor:
    """The CUDA path of silu_and_mul (activations/gates.py), with `gelu` of gelu_and_mul, with `swiglu` of clamped_swiglu."""
    length = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], length), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    rows = gate_up.view(-1, 2 * length)
    cols = min(power_of_2(length), _MOST_COLS)
    gate_kernel[rows.shape[0], cdiv(length, cols)](
        rows,
        out,
        rows.stride(0),
        *(swiglu or (0.0, 0.0)),
        LEN=length,
        GELU=gelu,
        CLAMPED=swiglu is not None,
        COLS=cols,
        num_warps=warps_for(cols),
    )
    return out
