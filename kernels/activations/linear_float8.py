"""linear_float8: x W^T + b with weights and rows in 8-bit floats, e4m3, multiplied as they are.

An output of a weight has one scale, and is rounded once; a row of x has one, and is rounded in every call, so that no row costs
another one its precision. torch's scaled_mm multiplies: on CUDA from compute capability 8.9 on with units for such numbers, on
a CPU with what it has, which is slower than any other way.

An output that lies on such a grid already, as one restored from a checkpoint in 8-bit floats does, is found there again. It
lies on one whose scale is its own or that of all outputs, and where scales of its inputs differ by powers of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import ScalingType, scaled_mm

from ..checks import on_cuda, require
from ..errors import UnsupportedDeviceError
from ..types import LinearWeight

_OP = "linear_float8"
_MOST: Final = 448.0
_TOPS: Final = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)  # of a grid the largest number, but for a power of two
_ON_GRID: Final = 5e-5  # mean square of what numbers on a grid are off, as bfloat16 rounds, over their size; 7e-4 is chance
_LEAST_NORMAL: Final = 2.0**-6
_SAMPLE: Final = 64  # outputs that say whether a weight lies on grids
_MOSTLY: Final = 0.5
_LEAST: Final = 1e-30  # of a row of zeros
_AT_A_TIME: Final = 1 << 23  # weights that are quantised together, about
_SIDE: Final = 16  # inputs and outputs come in so many
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_CAPABILITY: Final = (8, 9)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A weight whose outputs have a scale each.

    Attributes:
        codes: float8_e4m3fn [out_features, in_features].
        scales: float32 [1, out_features].
        bias: [out_features], in the dtype of the rows that are multiplied; None: there is none.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None


def fits_float8(weight: LinearWeight) -> bool:
    """Whether a dense weight is one, with sides that are multiplied so."""
    return weight.data.dim() == 2 and not any(side % _SIDE for side in weight.data.shape)


def quantise_float8(weight: LinearWeight) -> Float8Weight:
    """Quantise a dense weight where it is; it may be dropped then.

    Args:
        weight: float32 or of 16 bits, [O, I], both a multiple of 16.

    Raises:
        KernelArgumentError: another dtype or shape, packed already, or a weight that is not finite.
        UnsupportedDeviceError: neither on a CPU nor on CUDA, or on a device that does not multiply such numbers.
    """
    data = weight.data
    if on_cuda(_OP, data) and torch.cuda.get_device_capability(data.device) < _CAPABILITY:
        raise UnsupportedDeviceError(_OP, f"{data.device}, of a compute capability below 8.9")
    fits = data.dtype in _DTYPES and not weight.packed and fits_float8(weight)
    require(fits, _OP, "weight", "must be dense [O, I], of multiples of 16, is {} {}", data.dtype, data.shape)
    codes, scales = data.new_empty(data.shape, dtype=torch.float8_e4m3fn), data.new_empty(1, len(data), dtype=torch.float32)
    tops = _choose_tops(data[:: max(len(data) // _SAMPLE, 1)].float())
    num_rows = max(_AT_A_TIME // data.shape[1], 1)
    for rows, own_codes, own_scales in zip(*(each.split(num_rows) for each in (data, codes, scales[0])), strict=True):
        require(bool(torch.isfinite(rows).all()), _OP, "weight", "must be finite")
        found, scale, _ = _quantise(rows.float(), tops)
        own_codes.copy_(found)
        own_scales.copy_(scale)
    return Float8Weight(codes, scales, None if weight.bias is None else weight.bias.contiguous())


def _quantise(rows: torch.Tensor, tops: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [O, I], scales [O] and mean squares off [O] of weights [O, I]. tops: of the grids that are tried."""
    codes, scales, errors = _fit(rows, tops[0])
    for top in tops[1:]:
        apart = (errors > _ON_GRID).nonzero()[:, 0]
        of_top, scale, error = _fit(rows[apart], top)
        is_found = error <= _ON_GRID
        found = apart[is_found]
        codes.view(torch.uint8)[found] = of_top.view(torch.uint8)[is_found]
        scales[found], errors[found] = scale[is_found], error[is_found]
    return codes, scales, errors


def _fit(rows: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same where the largest number of each output is to be `top`. Scales are those that the codes are least off with."""
    scales = rows.abs().amax(1).clamp_(min=_LEAST) / top
    levels = rows / scales[:, None]
    codes = levels.to(torch.float8_e4m3fn)
    wide = codes.float()
    errors = ((levels - wide) / levels.abs().clamp_(min=_LEAST_NORMAL)).square_().mean(1)
    ratios = (levels * wide).sum(1) / wide.square().sum(1).clamp_(min=_LEAST_NORMAL)
    return codes, torch.where(ratios > 0, scales * ratios, scales), errors


def _choose_tops(sample: torch.Tensor) -> Sequence[float]:
    """What is worth trying for a weight with such outputs [O, I]: all, if they lie on grids."""
    is_on = _quantise(sample, _TOPS)[2] <= _ON_GRID
    return _TOPS if float(is_on.float().mean()) > _MOSTLY else _TOPS[:1]


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, float8_e4m3fn [N, I], and scales, float32 [N, 1], whose products are about x [N, I].

    The largest number of a row becomes 448. A row that is not finite has a scale or a code that is not.

    Raises:
        KernelArgumentError: x is not contiguous, or of another dtype than float32 and those of 16 bits.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    fits = x.dim() == 2 and x.is_contiguous() and x.dtype in _DTYPES
    require(fits, "quantise_rows", "x", "must be contiguous [N, I], is {} {}", x.dtype, x.shape)
    if on_cuda("quantise_rows", x):
        from ..gpu.quantise_rows import quantise_rows as on_device

        return on_device(x, _LEAST, _MOST)
    largest = x.abs().amax(1, keepdim=True).float().clamp_(min=_LEAST)
    factors = torch.full_like(largest, _MOST) / largest  # a number of Python is multiplied by a reciprocal
    return (x.float() * factors).to(torch.float8_e4m3fn), largest / _MOST


def linear_float8(x: torch.Tensor, weight: Float8Weight) -> torch.Tensor:
    """Return about x W^T + b, [..., out_features] for x [..., in_features], in x's dtype.

    A row of x that is not finite gives a row that is not.

    Args:
        x: float32 or of 16 bits, where the weight is. On CUDA torch adds a bias to products of 16 bits alone.

    Raises:
        KernelArgumentError: shapes, dtypes or devices that do not fit.
    """
    num_out, num_in = weight.codes.shape
    fits = x.shape[-1] == num_in and x.dtype in _DTYPES and x.is_cuda == weight.codes.is_cuda
    problem = "{} {} does not fit {} inputs of 8-bit floats on {}"
    require(fits, _OP, "x", problem, x.dtype, x.shape, num_in, "CUDA" if weight.codes.is_cuda else "a CPU")
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], num_out)
    codes, scales = quantise_rows(x.reshape(-1, num_in).contiguous())
    recipe = ScalingType.RowWise
    out = scaled_mm(codes, weight.codes.T, scales, recipe, weight.scales, recipe, bias=weight.bias, output_dtype=x.dtype)
    return out.view(*x.shape[:-1], num_out)
