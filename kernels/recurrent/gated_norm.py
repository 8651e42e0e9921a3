"""gated_norm: the norm of each head's outputs, gated, in one pass: what comes behind a gated delta net, or behind Mamba 2."""

import torch
from torch.nn import functional

from ..checks import on_cuda, require
from ..cpu import compiled
from ..cpu.delta import gated_norm as compiled_gated_norm

_OP = "gated_norm"


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, is_sigmoid: bool = False
) -> torch.Tensor:
    """Each head at a root mean square of 1, times the weight and silu of the gate.

    Args:
        x: [T, H, D], contiguous.
        gate: [T, H * D], x's dtype, row t at a stride.
        weight: [D]; or [H, D], with which what is gated is put to that root mean square, and not what is given.
        eps: added to the mean square.
        is_sigmoid: the gate's sigmoid instead of its silu; not of what is gated before the norm.

    Returns:
        [T, H * D].

    Raises:
        KernelArgumentError: shapes, strides or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, x)
    require(x.dim() == 3 and x.is_contiguous(), _OP, "x", "must be contiguous [T, H, D], is {}", x.shape)
    fits = gate.shape == (x.shape[0], x.shape[1] * x.shape[2]) and gate.dtype is x.dtype and gate.stride(1) == 1
    require(fits, _OP, "gate", "{} {} does not fit {} {}", gate.dtype, gate.shape, x.dtype, x.shape)
    is_behind = weight.dim() == 2
    require(not (is_behind and is_sigmoid), _OP, "is_sigmoid", "is of a weight [D]")
    fits = weight.shape == x.shape[1 if is_behind else 2 :] and weight.dtype is x.dtype and weight.is_contiguous()
    require(fits, _OP, "weight", "must be {} {}, is {} {}", x.dtype, x.shape[2:], weight.dtype, weight.shape)
    if cuda:
        from ..gpu.gated_norm import gated_norm as on_device

        return on_device(x, gate, weight, eps, is_sigmoid=is_sigmoid)
    if compiled.serves(x):
        return compiled_gated_norm(x, gate, weight, eps, is_sigmoid=is_sigmoid)
    gates = gate.unflatten(1, x.shape[1:]).float()
    weighed = gates.sigmoid() if is_sigmoid else functional.silu(gates)
    if is_behind:
        return (torch.rms_norm(x.float() * weighed, (x.shape[2],), None, eps).to(x.dtype) * weight).flatten(1)
    return (torch.rms_norm(x, (x.shape[2],), weight, eps).float() * weighed).to(x.dtype).flatten(1)
