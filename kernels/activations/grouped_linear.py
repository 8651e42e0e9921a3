"""grouped_linear: rows sorted by group, each group of rows times a weight of its own; the experts of a layer in one launch."""

import itertools

import torch

from ..checks import on_cuda, require
from ..types import LinearWeight

_OP = "grouped_linear"


def grouped_linear(x: torch.Tensor, weight: LinearWeight, starts: torch.Tensor) -> torch.Tensor:
    """Return [N, O]: row r of group g is x[r] W[g]^T + b[g].

    Args:
        x: [N, I], contiguous, the rows of group 0 first.
        weight: [E, O, I] and perhaps a bias [E, O], dense; x's dtype.
        starts: int32 [E + 1], from 0 to N, rising: group g has the rows [starts[g], starts[g + 1]).

    Raises:
        KernelArgumentError: shapes, strides or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, x)
    data, bias = weight.data, weight.bias
    fits = data.dim() == 3 and x.dim() == 2 and x.shape[1] == data.shape[2] and x.dtype == data.dtype and not weight.packed
    require(fits, _OP, "x", "{} {} does not fit {} {}", x.dtype, x.shape, data.dtype, data.shape)
    require(bias is None or bias.shape == data.shape[:2], _OP, "weight", "needs a bias of {}", data.shape[:2])
    fits = starts.shape == (data.shape[0] + 1,) and starts.dtype is torch.int32
    require(fits, _OP, "starts", "must be int32 [{}], is {} {}", data.shape[0] + 1, starts.dtype, starts.shape)
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
