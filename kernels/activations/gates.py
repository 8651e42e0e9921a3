"""Gates of a fused gate-and-up projection: act(gate) * up, one call for both halves; and what an MLP without a gate has."""

from typing import Final

import torch

from ..checks import on_cuda, require
from ..cpu import compiled
from ..cpu.rows import gate as compiled_gate
from ..cpu.rows import square_of_relu as compiled_square
from ..cpu.rows import weigh_by_sigmoid as compiled_weigh

_HALVES: Final = "must have an even last dimension, is {}"


def silu_and_mul(gate_up: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """The SwiGLU gate (arXiv 2002.05202), silu(gate) * up [..., I] of gate_up [..., 2 * I], gate first.

    up: [T, I], where it is not in gate_up, which is the gate [T, I] then. Its rows may be a stride apart.

    Raises:
        KernelArgumentError: an odd last dimension, another shape or dtype of `up`, or, on CUDA, gaps.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    if (fused := _fused("silu_and_mul", gate_up, up)) is not None:
        return fused
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    return torch.nn.functional.silu(gate).mul_(up)


def gelu_and_mul(gate_up: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """The GeGLU gate (arXiv 2002.05202) with the tanh approximation, gelu(gate) * up; all else as silu_and_mul."""
    if (fused := _fused("gelu_and_mul", gate_up, up, gelu=True)) is not None:
        return fused
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The gate of gpt-oss (arXiv 2508.10925), gate * sigmoid(alpha * gate) * (up + 1), both clamped first; all else as
    silu_and_mul. The gate is at most `limit`, up within it on both sides.
    """
    if (fused := _fused("clamped_swiglu", gate_up, swiglu=(alpha, limit))) is not None:
        return fused
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * alpha).sigmoid_().mul_(gate).mul_(up + 1)


def square_of_relu(x: torch.Tensor) -> torch.Tensor:
    """The square of x where it is positive (arXiv 2109.08668), else 0.

    Raises:
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    on_cuda("square_of_relu", x)
    return compiled_square(x) if compiled.serves(x) and x.is_contiguous() else x.relu().square_()


def weigh_by_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [T, I] times the sigmoid of gate [T, I] or [T, 1], whose rows are a stride apart.

    Raises:
        KernelArgumentError: another shape or dtype of the gate.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    op = "weigh_by_sigmoid"
    on_cuda(op, x)
    fits = gate.shape in (x.shape, (len(x), 1)) and gate.dtype is x.dtype
    require(fits, op, "gate", "{} {} does not fit {} {}", gate.dtype, gate.shape, x.dtype, x.shape)
    if compiled.serves(x) and x.is_contiguous() and gate.stride(1) == 1:
        return compiled_weigh(x, gate)
    return x * gate.sigmoid()


def _fused(
    op: str,
    gate_up: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    gelu: bool = False,
    swiglu: tuple[float, float] | None = None,
) -> torch.Tensor | None:
    """The gate by the kernel of its device; None where torch computes it."""
    cuda = on_cuda(op, gate_up)
    if up is None:
        require(gate_up.shape[-1] % 2 == 0, op, "gate_up", _HALVES, gate_up.shape)
    else:
        fits = gate_up.dim() == 2 and up.shape == gate_up.shape and up.dtype is gate_up.dtype
        require(fits, op, "up", "{} {} does not fit {} {}", up.dtype, up.shape, gate_up.dtype, gate_up.shape)
    if cuda:
        from ..gpu.gates import gate

        gate_up = gate_up if up is None else torch.cat((gate_up, up), 1)
        require(gate_up.is_contiguous(), op, "gate_up", "must be contiguous")
        return gate(gate_up, gelu=gelu, swiglu=swiglu)
    if compiled.serves(gate_up) and gate_up.is_contiguous() and (up is None or up.stride(1) == 1):
        return compiled_gate(gate_up, up, gelu=gelu, swiglu=swiglu)
    return None
