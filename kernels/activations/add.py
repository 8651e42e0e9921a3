"""add: the sum of two tensors, and its product with a number of the layer's, in one pass."""

import torch

from ..checks import on_cuda, require
from ..cpu import compiled
from ..cpu.rows import add as compiled_add

_OP = "add"


def add(x: torch.Tensor, other: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return x + other, times `scale` [1]; the sum is rounded to the dtype before. None: the sum.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    on_cuda(_OP, x)
    fits = other.shape == x.shape and other.dtype is x.dtype
    require(fits, _OP, "other", "must be {} {}, is {} {}", x.dtype, x.shape, other.dtype, other.shape)
    if scale is not None:
        fits = scale.shape == (1,) and scale.dtype is x.dtype
        require(fits, _OP, "scale", "must be {} [1], is {} {}", x.dtype, scale.dtype, scale.shape)
    if compiled.serves(x) and x.is_contiguous() and other.is_contiguous():
        return compiled_add(x, other, scale)
    return x + other if scale is None else (x + other) * scale
