"""Products of rows and a weight, compiled, and how a weight lies for them: see tiles.py and integer_tiles.py."""

from typing import Final, Literal, NamedTuple

import torch
from torch.nn import functional

from .compiled import load_kernels
from .launch import Launcher

GROUP: Final = 32  # inputs that have a scale together, where rows and weights are integers

_multiply = Launcher("multiply", "q" * 9)
_quantise = Launcher("quantise_rows", "q" * 5)
_multiply_int8 = Launcher("multiply_int8", "q" * 9)
_multiply_int4 = Launcher("multiply_int4", "q" * 9)


class RowBlocks(NamedTuple):
    """Where a weight is, [ceil(O / width), room / n, width, n] with n numbers to 4 bytes; it has no more inputs than room."""

    address: int
    width: int
    room: int


class IntegerBlocks(NamedTuple):
    """A weight of integers of `bits` bits.

    Attributes:
        blocks: uint8 [ceil(O / width), groups, bytes of a group], see integer_tiles.py; width: outputs that this processor's
            vectors take at a time.
        factors: float32 [O], what each output is multiplied by in the end.
    """

    bits: Literal[8, 4]
    blocks: torch.Tensor
    factors: torch.Tensor

    def write(
        self, first: int, integers: torch.Tensor, scales: torch.Tensor, lows: torch.Tensor, factors: torch.Tensor
    ) -> None:
        """Set R outputs from `first` on, which the width divides: integers int8 [R, groups, GROUP].

        scales, lows: [R, groups]. The lows of 8 bits are 0, and not kept.
        """
        width, num_groups = _width(), self.blocks.shape[1]
        padded = functional.pad(integers, (0, 0, 0, 0, 0, -len(integers) % width))
        steps = padded.view(-1, width, num_groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
        if self.bits == 4:
            steps = steps[:, :, 0::2] | steps[:, :, 1::2] << 4
        terms = [_pack_halves(each, width) for each in ((scales,) if self.bits == 8 else (scales, lows))]
        own = self.blocks[first // width :][: len(padded) // width]
        torch.cat((steps.flatten(2).view(torch.uint8), *terms), 2, out=own)
        self.factors[first : first + len(factors)] = factors


def allocate_blocks(bits: Literal[8, 4], num_out: int, num_in: int) -> IntegerBlocks:
    """Memory for a weight [O, I]."""
    width, num_groups = _width(), -(-num_in // GROUP)
    group_bytes = width * (GROUP * bits // 8 + (2 if bits == 8 else 4))
    blocks = torch.empty((-(-num_out // width), num_groups, group_bytes), dtype=torch.uint8)
    return IntegerBlocks(bits, blocks, torch.empty(num_out))


def _width() -> int:
    width: int = load_kernels("integer_kernels", "").WIDTH
    return width


def multiply(x: torch.Tensor, blocks: RowBlocks, bias: torch.Tensor | None, num_out: int) -> torch.Tensor:
    """x W^T + bias, [..., num_out] of x [..., I], contiguous, of float32 or bfloat16."""
    num_in = x.shape[-1]
    out = torch.empty((*x.shape[:-1], num_out), dtype=x.dtype)
    num_rows = out.numel() // num_out
    if num_rows:
        bias_at = 0 if bias is None else bias.data_ptr()
        _multiply(x.dtype, num_in * num_out, x.data_ptr(), num_rows, num_in, *blocks, bias_at, out.data_ptr(), num_out)
    return out


def _pack_halves(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """[O, groups] as the bytes of halves, [blocks, groups, 2 width]."""
    padded = functional.pad(numbers, (0, 0, 0, -len(numbers) % width))
    return padded.half().view(-1, width, numbers.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers int8 [T, groups, GROUP] of float32 x [..., I], contiguous, and the terms of each group, 8 bytes."""
    num_in = x.shape[-1]
    num_rows, num_groups = x.numel() // num_in, -(-num_in // GROUP)
    rows, terms = torch.empty((num_rows, num_groups, GROUP), dtype=torch.int8), torch.empty((num_rows, num_groups, 2))
    _quantise(x.dtype, x.numel(), x.data_ptr(), num_rows, num_in, rows.data_ptr(), terms.data_ptr())
    return rows, terms


def multiply_integers(x: torch.Tensor, weight: IntegerBlocks, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + bias, float32 [..., O] of float32 x [..., I], contiguous, whose rows are quantised."""
    num_out, num_in = len(weight.factors), x.shape[-1]
    num_rows, num_groups = x.numel() // num_in, weight.blocks.shape[1]
    out = torch.empty((*x.shape[:-1], num_out))
    if num_rows:
        rows, terms = quantise_rows(x)
        of_rows = rows.data_ptr(), terms.data_ptr(), num_rows, num_groups
        of_weight = weight.blocks.data_ptr(), weight.factors.data_ptr(), 0 if bias is None else bias.data_ptr()
        launch = _multiply_int8 if weight.bits == 8 else _multiply_int4
        launch(x.dtype, num_in * num_out, *of_rows, *of_weight, out.data_ptr(), num_out)
    return out
