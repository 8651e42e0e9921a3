"""linear: x W^T + b with a weight that is packed once for the device.

On a CPU, torch's float32 product goes to MKL, which on non-Intel machines runs at half the speed of oneDNN with a
prepacked weight (16 rows, measured: 90 against 160 to 220 GFLOP/s). The packed op is the one that torch's own
compiler uses when it freezes a model; it is not a public name, so where it is missing or refuses, the weight stays as
it is.
"""

import torch

from ..checks import on_cuda, require
from .linear_int8 import Int8Weight, linear_int8
from .linear_weight import LinearWeight

_OP = "linear"


def pack_linear(weight: LinearWeight) -> LinearWeight:
    """Pack a weight where its device has something to gain; the dense one may be dropped then."""
    data = weight.data
    if weight.packed or not data.is_cpu or data.dtype is not torch.float32 or not torch.backends.mkldnn.is_available():
        return weight
    try:
        packed = LinearWeight(torch.ops.mkldnn._reorder_linear_weight(data, None), weight.bias, packed=True)
        linear(data.new_zeros(1, data.shape[1]), packed)  # refuses here if it refuses at all
    except (AttributeError, RuntimeError):
        return weight  # another torch: the plain product is right, if slower
    return packed


def linear(x: torch.Tensor, weight: LinearWeight | Int8Weight) -> torch.Tensor:
    """Return x W^T + b, [..., out_features] for x [..., in_features]; with an Int8Weight, as linear_int8 does.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    if isinstance(weight, Int8Weight):
        return linear_int8(x, weight)
    on_cuda(_OP, x)
    fits = x.shape[-1] == weight.data.shape[1] and x.dtype == weight.data.dtype
    require(fits, _OP, "x", "{} {} does not fit {}", x.dtype, x.shape, weight.data.shape)
    if weight.packed:
        return torch.ops.mkldnn._linear_pointwise(x, weight.data, weight.bias, "none", [], "")
    return torch.nn.functional.linear(x, weight.data, weight.bias)
