"""grouped_linear: rows sorted by group, each group of rows times a weight of its own; the experts of a layer in one launch."""

import itertools

import torch

from ..checks import on_cuda, require
from ..device_integers import DeviceIntegers
from ..errors import KernelArgumentError
from ..types import LinearWeight
from .linear_integers import IntegerWeight, require_rows

_OP = "grouped_linear"


def grouped_linear(x: torch.Tensor, weight: LinearWeight | IntegerWeight, starts: torch.Tensor) -> torch.Tensor:
    """Return [N, O]: row r of group g is x[r] W[g]^T + b[g]; with an IntegerWeight, on CUDA alone, about that.

    Args:
        x: [N, I], contiguous, the rows of group 0 first.
        weight: [E, O, I] and perhaps a bias [E, O], dense; x's dtype.
        starts: int32 [E + 1], from 0 to N, rising: group g has the rows [starts[g], starts[g + 1]).

    Raises:
        KernelArgumentError: shapes, strides or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    if isinstance(weight, IntegerWeight):
        return _multiply_integers(x, weight, starts)
    cuda = on_cuda(_OP, x)
    data, bias = weight.data, weight.bias
    fits = data.dim() == 3 and x.dim() == 2 and x.shape[1] == data.shape[2] and x.dtype == data.dtype and not weight.packed
    require(fits, _OP, "x", "{} {} does not fit {} {}", x.dtype, x.shape, data.dtype, data.shape)
    require(bias is None or bias.shape == data.shape[:2], _OP, "weight", "needs a bias of {}", data.shape[:2])
    _require_starts(starts, len(data))
    if cuda:
        from ..gpu.grouped_linear import grouped_linear as on_device

        dense = x.is_contiguous() and data.is_contiguous() and (bias is None or bias.is_contiguous())
        require(dense, _OP, "x", "and the weight must be contiguous")
        return on_device(x, data, bias, starts)
    bounds = starts.tolist()
    rises = bounds[0] == 0 and bounds[-1] == len(x) and sorted(bounds) == bounds
    require(rises, _OP, "starts", "must rise from 0 to {}", len(x))
    out = x.new_empty(len(x), data.shape[1])
    for group, (first, last) in enumerate(itertools.pairwise(bounds)):
        if first < last:
            own_bias = None if bias is None else bias[group]
            out[first:last] = torch.nn.functional.linear(x[first:last], data[group], own_bias)
    return out


def _require_starts(starts: torch.Tensor, num_groups: int) -> None:
    fits = starts.shape == (num_groups + 1,) and starts.dtype is torch.int32
    require(fits, _OP, "starts", "must be int32 [{}], is {} {}", num_groups + 1, starts.dtype, starts.shape)


def _multiply_integers(x: torch.Tensor, weight: IntegerWeight, starts: torch.Tensor) -> torch.Tensor:
    blocks = weight.blocks
    if not (isinstance(blocks, DeviceIntegers) and blocks.is_stacked):
        raise KernelArgumentError(_OP, "weight", "of integers must be several, on CUDA")
    require(x.dim() == 2 and x.is_contiguous(), _OP, "x", "must be contiguous, of two dimensions, is {}", x.shape)
    require_rows(_OP, x, weight)
    _require_starts(starts, len(blocks.factors))
    from ..gpu.integer_linear import integer_linear

    return integer_linear(x, blocks, weight.bias, starts)
