"""rms_norm: root-mean-square layer norm, optionally fused with the residual addition before it (arXiv 1910.07467)."""

import torch

from ..checks import on_cuda, require
from ..cpu import compiled
from ..cpu.rows import rms_norm as compiled_rms_norm

_OP = "rms_norm"


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last dimension of x, or of x + residual.

    Args:
        x: [..., D]. With a residual, x is overwritten by the sum.
        weight: [D], or [H, D] for x [..., H, D] (a weight per head, so that queries and keys share one call).
        eps: added to the mean square.
        residual: shape and dtype of x, or None.

    Returns:
        The normalised tensor, and the sum that was normalised (x itself without a residual): the next residual.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, x)
    fits = weight.dim() <= 2 and weight.shape == x.shape[x.dim() - weight.dim() :]
    require(fits, _OP, "weight", "{} must be the end of x's shape {}", weight.shape, x.shape)
    require(weight.dtype == x.dtype, _OP, "weight", "must be {}, is {}", x.dtype, weight.dtype)
    if residual is not None:
        fits = residual.shape == x.shape and residual.dtype == x.dtype
        require(fits, _OP, "residual", "must be {} {}", x.dtype, x.shape)
    if cuda:
        from ..gpu import rms_norm as gpu

        rows = [x] if residual is None else [x, residual]
        dense = all(row.is_contiguous() or (row.dim() == 3 and row.stride(2) == 1) for row in rows)
        require(dense, _OP, "x", "and residual must be contiguous, or [T, H, D] and contiguous in D")
        return gpu.rms_norm(x, weight, eps, residual), x
    if compiled.serves(x) and _in_rows(x, weight) and (residual is None or residual.is_contiguous()):
        return compiled_rms_norm(x, weight, eps, residual), x
    if residual is not None:
        x = x.add_(residual)
    if weight.dim() == 1:
        return torch.rms_norm(x, (x.shape[-1],), weight, eps), x
    return torch.rms_norm(x, (x.shape[-1],), None, eps).mul_(weight), x


def _in_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the compiled kernel can walk x: without gaps, or, with a weight per head, with gaps between tokens only."""
    dense = weight.is_contiguous() and x.is_contiguous()
    return dense or (weight.is_contiguous() and weight.dim() == 2 and x.dim() == 3 and x.stride()[1:] == weight.stride())
