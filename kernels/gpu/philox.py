"""uniforms on CUDA: one number a row by Philox4x32-10, to the bits of kernels/philox.py."""

import torch
import triton
import triton.language as tl

from .sizes import cdiv

_ROWS = 128


@triton.jit(do_not_specialize=["num_rows"])
def uniforms_kernel(numbers_ptr, stride, out_ptr, num_rows, ROWS: tl.constexpr):
    """ROWS rows: seed, sample index and position of each, `stride` numbers apart."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < num_rows
    seed = tl.load(numbers_ptr + rows, mask=live, other=0)
    sample = tl.load(numbers_ptr + stride + rows, mask=live, other=0)
    position = tl.load(numbers_ptr + 2 * stride + rows, mask=live, other=0)
    c0, c1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c2, c3 = sample.to(tl.uint32), (sample >> 32).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, c0, c1, c2, c3)
    high, low = (first >> 5).to(tl.int64), (second >> 6).to(tl.int64)
    number = (high * 67108864 + low).to(tl.float64) * (1.0 / 9007199254740992.0)
    tl.store(out_ptr + rows, number, mask=live)


def uniforms_there(numbers: torch.Tensor) -> torch.Tensor:
    """The CUDA path of kernels.philox, with its argument."""
    num_rows = numbers.shape[1]
    out = torch.empty(num_rows, dtype=torch.float64, device=numbers.device)
    if num_rows:
        uniforms_kernel[(cdiv(num_rows, _ROWS),)](numbers, numbers.stride(0), out, num_rows, ROWS=_ROWS, num_warps=4)
    return out
