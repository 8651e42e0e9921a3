"""find_likeliest on CUDA: rows are cut into parts, so that few rows fill the device too, and a second kernel joins them."""

import torch
import triton
import triton.language as tl

from .sizes import cdiv, power_of_2

_COLS = 4096


@triton.jit
def likeliest_of_part_kernel(logits_ptr, value_ptr, token_ptr, row_stride, vocab_size, COLS: tl.constexpr):
    """COLS tokens of one row: the highest logit, +inf for NaN, and the first token that has it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = part * COLS + tl.arange(0, COLS)
    values = tl.load(logits_ptr + row * row_stride + cols, mask=cols < vocab_size, other=float("-inf"))
    values = tl.where(values != values, float("inf"), values)
    highest, place = tl.max(values, 0, return_indices=True)
    at = row * tl.num_programs(1) + part
    tl.store(value_ptr + at, highest)
    tl.store(token_ptr + at, part * COLS + place)


@triton.jit(do_not_specialize=["num_parts"])
def likeliest_of_row_kernel(
    value_ptr, token_ptr, likeliest_ptr, outcome_ptr, num_parts, PARTS: tl.constexpr, NOT_FINITE: tl.constexpr
):
    """The parts of one row, in their order."""
    row, parts = tl.program_id(0), tl.arange(0, PARTS)
    values = tl.load(value_ptr + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    highest, place = tl.max(values, 0, return_indices=True)
    token = tl.load(token_ptr + row * num_parts + place).to(tl.int64)
    is_finite = (highest > float("-inf")) & (highest < float("inf"))
    tl.store(likeliest_ptr + row, token)
    tl.store(outcome_ptr + row, tl.where(is_finite, token, NOT_FINITE))


def find_likeliest(logits: torch.Tensor, not_finite: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The CUDA path of kernels.find_likeliest, with its argument. not_finite: what stands in the place of a token there."""
    num_rows, vocab_size = logits.shape
    likeliest = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    outcomes = torch.empty_like(likeliest)
    if not num_rows:
        return likeliest, outcomes
    num_parts = cdiv(vocab_size, _COLS)
    values = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    likeliest_of_part_kernel[num_rows, num_parts](logits, values, tokens, logits.stride(0), vocab_size, COLS=_COLS, num_warps=8)
    likeliest_of_row_kernel[num_rows,](
        values, tokens, likeliest, outcomes, num_parts, PARTS=power_of_2(num_parts), NOT_FINITE=not_finite, num_warps=1
    )
    return likeliest, outcomes
