"""rotary: rotary position embedding of queries and keys, neox style (arXiv 2104.09864; halves, not pairs)."""

import torch

from ..checks import on_cuda, require
from ..cpu import compiled
from ..cpu.rows import rotary as compiled_rotary

_OP = "rotary"


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate every head of every token by its position.

    Args:
        x: [T, H, D], D even, the last dimension contiguous. Queries and keys may share one call.
        cos: [T, D], rows (cos, cos) of the token's position.
        sin: [T, D], rows (-sin, sin): with the sign in the table, the rotation is x * cos + swap_halves(x) * sin.

    Returns:
        A new tensor [T, H, D].

    Raises:
        KernelArgumentError: shapes, strides or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    require_tables(_OP, x, cos, sin)
    if on_cuda(_OP, x):
        from ..gpu import rotary as gpu

        return gpu.rotary(x, cos, sin)
    if compiled.serves(x) and x.stride(1) == x.shape[2] and cos.is_contiguous() and sin.is_contiguous():
        return compiled_rotary(x, cos, sin)
    swapped = x.roll(x.shape[2] // 2, 2)
    return torch.mul(x, cos.unsqueeze(1)).addcmul_(swapped, sin.unsqueeze(1))


def require_tables(op: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Raise KernelArgumentError unless x [T, H, D] can be rotated by the tables."""
    fits = x.dim() == 3 and x.shape[2] % 2 == 0 and x.stride(2) == 1
    require(fits, op, "x", "must be [T, H, D] with even D, contiguous in D, is {}", x.shape)
    table = (x.shape[0], x.shape[2])
    fits = cos.shape == table and sin.shape == table and cos.dtype == sin.dtype == x.dtype
    require(fits, op, "cos", "and sin must be {} {}, are {} and {}", x.dtype, table, cos.shape, sin.shape)
