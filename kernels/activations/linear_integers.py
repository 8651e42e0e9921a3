"""linear_integers: x W^T + b with products of integers, for a CPU.

Weights are quantised once, to 8 or 4 bits, in groups of 32 inputs of an output, as llama.cpp's Q8_0 and Q4_1 are. A weight of 4
bits that lies on such a grid already, as one restored from a checkpoint in 4 bits does, is found there again. Activations are
quantised to 8 bits in every call, in groups of 32 inputs of a row, so that one large number costs its own group alone its
precision, and a row's result does not depend on the rows beside it. What comes out is float32, the same on all processors. The
compiled kernels multiply; there is no other way.
"""

from dataclasses import dataclass
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
_LEAST_STEPS: Final = 8  # of the grids of 4 bits that are tried: one with fewer is a part of one with more
_MUCH_BETTER: Final = 0.98  # what a grid of fewer steps must bring an error down to
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
    quantise = _quantise_8 if bits == 8 else _quantise_4
    groups = functional.pad(data, (0, -data.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    parts = [quantise(rows) for rows in groups.split(_ROWS_AT_A_TIME)]
    integers, scales, lows, factors = (
        torch.cat(each) if isinstance(each[0], torch.Tensor) else None for each in zip(*parts, strict=True)
    )
    assert integers is not None
    assert scales is not None
    assert factors is not None
    return IntegerWeight(pack_integers(integers, scales, lows, factors), weight.bias, data.shape[1], data.shape[0])


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


def _quantise_8(groups: torch.Tensor) -> _Parts:
    """Integers, scales over factors, no lows, and factors, of weights [O, groups, GROUP]."""
    scales = groups.abs().amax(2) / _MOST_8
    factors = scales.amax(1).clamp_(min=_LEAST_FACTOR)
    halves = _half_up(scales / factors[:, None])
    integers = (groups / (halves * factors[:, None]).clamp_(min=_LEAST_FACTOR)[..., None]).round_()
    return integers.clamp_(-_MOST_8, _MOST_8).to(torch.int8), halves, None, factors


def _quantise_4(groups: torch.Tensor) -> _Parts:
    """The same with lows."""
    low, high = groups.amin(2), groups.amax(2)
    widest = (high - low).amax(1) / _MOST_4
    factors = torch.maximum(widest, low.abs().amax(1) / _LOWS_TO_SCALES).clamp_(min=_LEAST_FACTOR)
    lows = (low / factors[:, None]).half().float()
    best, error = None, torch.empty(0)
    for num_steps in range(_MOST_4, _LEAST_STEPS - 1, -1):
        scales = ((high - low) / num_steps / factors[:, None]).half().float()
        steps = (scales * factors[:, None]).clamp_(min=_LEAST_FACTOR)[..., None]
        begin = (lows * factors[:, None])[..., None]
        integers = ((groups - begin) / steps).round_().clamp_(0, _MOST_4)
        errors = (integers * steps + begin - groups).square_().sum(2)
        if best is None:
            best, error = (integers, scales), errors
            continue
        is_better = errors < error * _MUCH_BETTER
        best = torch.where(is_better[..., None], integers, best[0]), torch.where(is_better, scales, best[1])
        error = torch.where(is_better, errors, error)
    assert best is not None, "of several grids"
    return best[0].to(torch.int8), best[1], lows, factors


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
