"""Products of rows and a weight, compiled, and how a weight lies for them: see tiles.py."""

from typing import NamedTuple

import torch

from .launch import Launcher

WIDTH = 64  # outputs of a block that is packed here

_multiply = Launcher("multiply", "q" * 9)
_quantise = Launcher("quantise_rows", "q" * 6 + "ddd")
_multiply_int8 = Launcher("multiply_int8", "q" * 12)


class RowBlocks(NamedTuple):
    """Where a weight is, [ceil(O / width), room / n, width, n] with n numbers to 4 bytes; it has no more inputs than room."""

    address: int
    width: int
    room: int


class Int8Blocks(NamedTuple):
    """A weight of 8-bit integers, and what its products need.

    Attributes:
        integers: int8 [ceil(O / WIDTH), steps, WIDTH, 4].
        shifts: int32 [O], the sum of each output's integers.
        factors: float32 [O], what one step of a product is worth.
    """

    integers: torch.Tensor
    shifts: torch.Tensor
    factors: torch.Tensor


class Levels(NamedTuple):
    """How a row is quantised: to so many levels on either side of `zero`.

    least: of the scale of a row.
    """

    levels: int
    zero: int
    least: float


def multiply(x: torch.Tensor, blocks: RowBlocks, bias: torch.Tensor | None, num_out: int) -> torch.Tensor:
    """x W^T + bias, [..., num_out] of x [..., I], contiguous, of float32 or bfloat16."""
    num_in = x.shape[-1]
    out = torch.empty((*x.shape[:-1], num_out), dtype=x.dtype)
    num_rows = out.numel() // num_out
    if num_rows:
        bias_at = 0 if bias is None else bias.data_ptr()
        _multiply(x.dtype, num_in * num_out, x.data_ptr(), num_rows, num_in, *blocks, bias_at, out.data_ptr(), num_out)
    return out


def pack_int8(integers: torch.Tensor, factors: torch.Tensor) -> Int8Blocks:
    """Lay out a weight, int8 [O, I]."""
    num_out, num_in = integers.shape
    padded = torch.nn.functional.pad(integers, (0, -num_in % 4, 0, -num_out % WIDTH))
    blocks = padded.view(-1, WIDTH, padded.shape[1] // 4, 4).transpose(1, 2).contiguous()
    return Int8Blocks(blocks, integers.sum(1, dtype=torch.int32), factors)


def multiply_int8(x: torch.Tensor, weight: Int8Blocks, bias: torch.Tensor | None, levels: Levels) -> torch.Tensor:
    """x W^T + bias, float32 [..., O] of float32 x [..., I], contiguous, whose rows are quantised."""
    num_out, num_in = len(weight.shifts), x.shape[-1]
    num_rows, num_steps = x.numel() // num_in, weight.integers.shape[1]
    out = torch.empty((*x.shape[:-1], num_out))
    if num_rows:
        rows, scales = torch.empty((num_rows, 4 * num_steps), dtype=torch.uint8), torch.empty(num_rows)
        own = rows.data_ptr(), 4 * num_steps, scales.data_ptr()
        _quantise(x.dtype, x.numel(), x.data_ptr(), num_rows, num_in, *own, *levels)
        of_weight = weight.integers.data_ptr(), WIDTH, weight.shifts.data_ptr(), weight.factors.data_ptr()
        bias_at = 0 if bias is None else bias.data_ptr()
        of_rows = rows.data_ptr(), scales.data_ptr(), num_rows, num_steps
        _multiply_int8(x.dtype, num_in * num_out, *of_rows, *of_weight, bias_at, levels.zero, out.data_ptr(), num_out)
    return out
