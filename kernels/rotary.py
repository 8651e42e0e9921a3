"""rotary: rotary position embedding of queries and keys, neox style (arXiv 2104.09864; halves, not pairs)."""

import torch

from kernels.checks import require, require_cpu

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
        UnsupportedDeviceError: not on a CPU.
    """
    require_cpu(_OP, x)
    fits = x.dim() == 3 and x.shape[2] % 2 == 0 and x.stride(2) == 1
    require(fits, _OP, "x", "must be [T, H, D] with even D, contiguous in D, is {}", x.shape)
    num_tokens, _, head_dim = x.shape
    table = (num_tokens, head_dim)
    fits = cos.shape == table and sin.shape == table and cos.dtype == sin.dtype == x.dtype
    require(fits, _OP, "cos", "and sin must be {} {}, are {} and {}", x.dtype, table, cos.shape, sin.shape)
    swapped = x.roll(head_dim // 2, 2)
    return torch.mul(x, cos.unsqueeze(1)).addcmul_(swapped, sin.unsqueeze(1))
