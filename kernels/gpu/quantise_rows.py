"""quantise_rows on CUDA: a program reads a row for its largest number, and once more, from a cache, to divide by it."""

import torch
import triton
import triton.language as tl

from .float8 import e4m3_bits
from .sizes import power_of_2

_MOST_COLS = 8192  # that a program has in registers at a time
_THREAD_ELEMENTS = 16


@triton.jit
def quantise_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, LEAST: tl.constexpr, MOST: tl.constexpr, LEN: tl.constexpr, COLS: tl.constexpr
):
    """One row of LEN numbers, COLS of them at a time. Bits order sizes as numbers do, and what is no number before all else."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, COLS)
    bits = tl.full([COLS], LEAST, tl.float32).to(tl.int32, bitcast=True)
    for first in range(0, LEN, COLS):
        x = tl.load(x_ptr + row * LEN + first + cols, mask=first + cols < LEN, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(bits, 0).to(tl.float32, bitcast=True)
    factor = tl.div_rn(MOST, largest)
    for first in range(0, LEN, COLS):
        x = tl.load(x_ptr + row * LEN + first + cols, mask=first + cols < LEN, other=0.0).to(tl.float32)
        tl.store(codes_ptr + row * LEN + first + cols, e4m3_bits(x * factor).to(tl.uint8), mask=first + cols < LEN)
    tl.store(scales_ptr + row, tl.div_rn(largest, MOST))


def quantise_rows(x: torch.Tensor, least: float, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The CUDA path of linear_float8.quantise_rows: x [N, I], contiguous. A row counts as if it had a number of `least`."""
    num_rows, length = x.shape
    codes = torch.empty((num_rows, length), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    cols = min(power_of_2(length), _MOST_COLS)
    warps = min(max(cols // (32 * _THREAD_ELEMENTS), 1), 16)
    quantise_rows_kernel[(num_rows,)](
        x,
        codes.view(torch.uint8),
        scales,
        LEAST=least,
        MOST=most,
        LEN=length,
        COLS=cols,
        num_warps=warps,
        enable_fp_fusion=False,  # a product that is not rounded before a step is added to it ties otherwise
    )
    return codes, scales
