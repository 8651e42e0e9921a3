"""linear_integers: x W^T + b with products of integers, for a CPU.

Weights are quantised once, to 8 or 4 bits, in groups of 32 inputs of an output, as llama.cpp's Q8_0 and Q4_1 are. A weight of 4
bits that lies on such a grid already, as one restored from a checkpoint in 4 bits does, is found there again. Activations are
quantised to 8 bits in every call, in groups of 32 inputs of a row, so that one large number costs its own group alone its
precision, and a row's result does not depend on the rows beside it. What comes out is float32, the same on all processors. The
compiled kernels multiply; there is no other way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch
from torch.nn import functional

from ..checks import require
from ..cpu import compiled
from ..cpu.products import GROUP, IntegerBlocks, multiply_integers, pack_integers
from ..errors import UnsupportedDeviceError
from ..types import LinearWeight

_OP = "linear_integers"
_MOST_8, _MOST_4 = 127, 15
_STEPS: Final = tuple(range(_MOST_4, 7, -1))  # of the grids of 4 bits that are tried: one with fewer is a part of one with more
_ON_GRID: Final = 0.005  # mean square of a step that weights on a grid are off it, as bfloat16 rounds; 0.083 is chance
_SAMPLE: Final = 64  # outputs that say whether weights lie on grids
_MOSTLY: Final = 0.5
_LEAST_FACTOR: Final = 1e-30  # of an output of zeros
_LOWS_TO_SCALES: Final = 1024  # so many times a row's greatest scale a low is at most: what halves can say of both
_ROWS_AT_A_TIME: Final = 1024


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A quantised weight; bias: float32 [out_features] or None."""

    blocks: IntegerBlocks
    bias: torch.Tensor | None
    in_features: int
    out_features: int


def quantise_linear(weight: LinearWeight, bits: Literal[8, 4]) -> IntegerWeight:
    """Quantise a dense float32 weight, which may be dropped then.

    Raises:
        KernelArgumentError: another dtype, packed already, or a weight that is not finite.
        UnsupportedDeviceError: not on a CPU, or the compiled kernels are off.
    """
    data = weight.data
    if not data.is_cpu:
        raise UnsupportedDeviceError(_OP, str(data.device))
    require(data.dtype is torch.float32 and not weight.packed, _OP, "weight", "must be dense float32, is {}", data.dtype)
    require(bool(torch.isfinite(data).all()), _OP, "weight", "must be finite")
    if not compiled.serves(data):
        raise UnsupportedDeviceError(_OP, "cpu, without the compiled kernels")
    groups = functional.pad(data, (0, -data.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    quantise = _quantise_8 if bits == 8 else partial(_quantise_4, num_steps=_choose_steps(groups))
    parts = (quantise(rows) for rows in groups.split(_ROWS_AT_A_TIME))
    integers, scales, lows, factors = map(torch.cat, zip(*parts, strict=True))
    return IntegerWeight(pack_integers(bits, integers, scales, lows, factors), weight.bias, data.shape[1], data.shape[0])


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _quantise_8(groups: torch.Tensor) -> _Parts:
    """Integers, scales and lows over factors, and factors, of weights [O, groups, GROUP]. The lows are 0."""
    scales = groups.abs().amax(2) / _MOST_8
    factors = scales.amax(1).clamp_(min=_LEAST_FACTOR)
    halves = _half_up(scales / factors[:, None])
    integers = (groups / (halves * factors[:, None]).clamp_(min=_LEAST_FACTOR)[..., None]).round_()
    return integers.clamp_(-_MOST_8, _MOST_8).to(torch.int8), halves, torch.zeros_like(halves), factors


def _quantise_4(groups: torch.Tensor, num_steps: Sequence[int]) -> _Parts:
    """The same of 4 bits. num_steps: of the grids that are tried, the first for all groups."""
    flat, (low, high) = groups.flatten(0, 1), groups.flatten(0, 1).aminmax(dim=1)
    by_row = (high - low).view(groups.shape[:2]).amax(1) / _MOST_4, low.view(groups.shape[:2]).abs().amax(1) / _LOWS_TO_SCALES
    factors = torch.maximum(*by_row).clamp_(min=_LEAST_FACTOR)
    factor = factors.repeat_interleave(groups.shape[1])
    lows = (low / factor).half().float()
    begin, width = lows * factor, high - low
    integers, scales, errors = _fit_grid(flat, begin, width, factor, num_steps[0])
    for count in num_steps[1:]:
        apart = (errors > _ON_GRID).nonzero()[:, 0]
        of_less, scale, error = _fit_grid(flat[apart], begin[apart], width[apart], factor[apart], count)
        is_found = error <= _ON_GRID
        found = apart[is_found]
        integers[found], scales[found], errors[found] = of_less[is_found], scale[is_found], error[is_found]
    return integers.view(groups.shape), scales.view(groups.shape[:2]), lows.view(groups.shape[:2]), factors


def _fit_grid(
    flat: torch.Tensor, begin: torch.Tensor, width: torch.Tensor, factor: torch.Tensor, num_steps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups [N, GROUP] on grids of so many steps: integers int8, scales over factors [N], mean squares off in steps [N]."""
    scales = (width / num_steps / factor).half().float()
    levels = (flat - begin[:, None]).div_((scales * factor).clamp_(min=_LEAST_FACTOR)[:, None])
    integers = levels.round().clamp_(0, _MOST_4)
    errors = levels.sub_(integers).square_().mean(1)
    return integers.to(torch.int8), scales, errors


def _choose_steps(groups: torch.Tensor) -> Sequence[int]:
    """The grids that are worth trying for weights [O, groups, GROUP]: all, if a sample of them lies on such ones."""
    sample = groups[:: max(len(groups) // _SAMPLE, 1)]
    flat = sample.flatten(0, 1)
    low, high = flat.aminmax(dim=1)
    width, is_on = high - low, torch.zeros(len(flat), dtype=torch.bool)
    for count in _STEPS:
        is_on |= _fit_grid(flat, low, width, width.clamp(min=_LEAST_FACTOR), count)[2] <= _ON_GRID
    return _STEPS if float(is_on.float().mean()) > _MOSTLY else _STEPS[:1]


def _half_up(numbers: torch.Tensor) -> torch.Tensor:
    """The halves at or above them, as float32, so that no weight is beyond the last step."""
    halves = numbers.half()
    return torch.where(halves.float() < numbers, torch.nextafter(halves, halves.new_tensor(torch.inf)), halves).float()


def linear_integers(x: torch.Tensor, weight: IntegerWeight) -> torch.Tensor:
    """Return about x W^T + b, float32 [..., out_features] for float32 x [..., in_features].

    A row of x that is not finite gives a row that is not.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit.
    """
    fits = x.shape[-1] == weight.in_features and x.dtype is torch.float32
    require(fits, _OP, "x", "{} {} does not fit {} inputs", x.dtype, x.shape, weight.in_features)
    return multiply_integers(x.contiguous(), weight.blocks, weight.bias)
