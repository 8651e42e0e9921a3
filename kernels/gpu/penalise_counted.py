"""penalise_counted on CUDA: one pass over counts and logits, to the bits of the CPU's."""

import torch
import triton
import triton.language as tl

from ..types import CountedTensors
from .sizes import cdiv

_COLS = 1024


@triton.jit
def penalise_counted_kernel(
    logits_ptr,
    counts_ptr,
    slot_ptr,
    token_ptr,
    addend_ptr,
    penalty_ptr,
    penalty_stride,
    row_stride,
    vocab_size,
    out_ptr,
    COLS: tl.constexpr,
):
    """COLS tokens of one row. The program that has the row's new token counts it, so there is nothing to wait for."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = cols < vocab_size
    own_ptr = counts_ptr + tl.load(slot_ptr + row) * vocab_size + cols
    addend = tl.load(addend_ptr + row)
    cells = tl.load(own_ptr, mask=live, other=0)
    is_new = (cols == tl.load(token_ptr + row)) & (addend != 0) & live
    cells = tl.where(is_new, cells + addend.to(cells.dtype), cells)
    tl.store(own_ptr, cells, mask=is_new)
    repetition = tl.load(penalty_ptr + row).to(tl.float32)
    frequency, presence = tl.load(penalty_ptr + penalty_stride + row), tl.load(penalty_ptr + 2 * penalty_stride + row)
    values = tl.load(logits_ptr + row * row_stride + cols, mask=live, other=0.0)
    repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    values = tl.where(cells > 0, repeated, values)
    less = (frequency * (cells >> 1).to(tl.float64) + presence).to(tl.float32)
    tl.store(out_ptr + row * vocab_size + cols, tl.where(cells > 1, values - less, values), mask=live)


def penalise_counted(logits: torch.Tensor, counts: torch.Tensor, rows: CountedTensors) -> torch.Tensor:
    """The CUDA path of kernels.penalise_counted, with its arguments."""
    num_rows, vocab_size = logits.shape
    out = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    if out.numel():
        penalise_counted_kernel[num_rows, cdiv(vocab_size, _COLS)](
            logits,
            counts,
            *rows,
            rows.penalties.stride(0),
            logits.stride(0),
            vocab_size,
            out,
            COLS=_COLS,
            num_warps=4,
            enable_fp_fusion=False,  # a product that is not rounded before the subtraction has other bits
        )
    return out
