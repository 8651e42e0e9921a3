"""linear_int8: x W^T + b with products of 8-bit integers, for a CPU.

Weights are quantised once, symmetrically, with a scale for each output (LLM.int8(), arXiv 2208.07339, without its outliers).
Activations are quantised in every call, with a scale for each row, so that a row's result does not depend on the rows beside
it. The sums are exact, and what comes out is float32. The compiled kernels multiply where they are on, else FBGEMM does,
through torch. Both round in the same order, so that their results are the same to the last bit.
"""

import warnings
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..checks import require
from ..cpu import compiled
from ..cpu.products import Int8Blocks, Levels, multiply_int8, pack_int8
from ..errors import UnsupportedDeviceError
from ..types import LinearWeight

_OP = "linear_int8"
# On either side of 0. AVX2 adds two products in 16 bits: (90 + 91) * 90 * 2 just fits, and an equal share of the bits for both
# factors gives the least error. Newer CPUs could do with more, but a model then would not be the same on all of them.
_LEVELS, _ZERO_POINT, _WEIGHT_LEVELS = 90, 91, 90
_LEAST_SCALE: Final = 1e-30  # of a row of zeros
_LEVELS_OF_ROW: Final = Levels(_LEVELS, _ZERO_POINT, _LEAST_SCALE)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A quantised weight.

    Attributes:
        packed: [out_features, in_features] as the compiled kernels have it, or as FBGEMM does, which is opaque.
        bias: float32 [out_features] or None.
    """

    packed: Int8Blocks | Any
    bias: torch.Tensor | None
    in_features: int
    out_features: int


def quantise_linear(weight: LinearWeight) -> Int8Weight:
    """Quantise a dense float32 weight, which may be dropped then.

    Raises:
        KernelArgumentError: another dtype, packed already, or a weight that is not finite.
        UnsupportedDeviceError: not on a CPU, or torch has no such product for this CPU.
    """
    data = weight.data
    if not data.is_cpu:
        raise UnsupportedDeviceError(_OP, str(data.device))
    require(data.dtype is torch.float32 and not weight.packed, _OP, "weight", "must be dense float32, is {}", data.dtype)
    scales = data.abs().amax(1).div_(_WEIGHT_LEVELS).clamp_(min=_LEAST_SCALE)
    require(bool(torch.isfinite(scales).all()), _OP, "weight", "must be finite")
    try:
        with warnings.catch_warnings():  # torch warns that another package will quantise one day
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(data), dtype=torch.long)
            integers = torch.quantize_per_channel(data.contiguous(), scales.double(), zeros, 0, torch.qint8)
        is_compiled = compiled.serves(data)
        factors = scales * (1 / _LEVELS)
        packed = pack_int8(integers.int_repr(), factors) if is_compiled else torch.ops.quantized.linear_prepack(integers, None)
        made = Int8Weight(packed, weight.bias, data.shape[1], data.shape[0])
        linear_int8(data.new_zeros(1, data.shape[1]), made)  # refuses here if it refuses at all
    except (AttributeError, RuntimeError):
        raise UnsupportedDeviceError(_OP, "cpu, of this kind") from None
    return made


def linear_int8(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """Return about x W^T + b, float32 [..., out_features] for float32 x [..., in_features].

    A row of x that is not finite gives a row that is not.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit.
    """
    fits = x.shape[-1] == weight.in_features and x.dtype is torch.float32
    require(fits, _OP, "x", "{} {} does not fit {} inputs", x.dtype, x.shape, weight.in_features)
    if isinstance(weight.packed, Int8Blocks):
        return multiply_int8(x.contiguous(), weight.packed, weight.bias, _LEVELS_OF_ROW)
    rows = x.reshape(-1, weight.in_features).contiguous()
    if not len(rows):
        return x.new_empty((*x.shape[:-1], weight.out_features))
    scales = rows.abs().amax(1, keepdim=True).clamp_(min=_LEAST_SCALE)
    product = _multiply(rows / scales, weight).mul_(scales)
    if weight.bias is not None:
        product.add_(weight.bias)
    return product.view(*x.shape[:-1], -1)


def _multiply(rows: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """Multiply rows [T, in_features], which are between -1 and 1."""
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default  # a shorter way than by its name
    product: torch.Tensor = multiply(rows, 1 / _LEVELS, _ZERO_POINT, weight.packed)
    return product
