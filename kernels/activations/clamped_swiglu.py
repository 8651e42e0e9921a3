"""clamped_swiglu: the gate of gpt-oss, gate * sigmoid(alpha * gate) * (up + 1), both clamped first (arXiv 2508.10925)."""

import torch

from ..checks import on_cuda, require
from ..cpu import compiled
from ..cpu.rows import gate as compiled_gate

_OP = "clamped_swiglu"


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return [..., I] of gate_up [..., 2 * I], gate first. The gate is at most `limit`, up within it on both sides.

    Raises:
        KernelArgumentError: an odd last dimension, or, on CUDA, gaps.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, gate_up)
    require(gate_up.shape[-1] % 2 == 0, _OP, "gate_up", "must have an even last dimension, is {}", gate_up.shape)
    if cuda:
        from ..gpu.gates import gate as gate_on_cuda

        require(gate_up.is_contiguous(), _OP, "gate_up", "must be contiguous")
        return gate_on_cuda(gate_up, gelu=False, swiglu=(alpha, limit))
    if compiled.serves(gate_up) and gate_up.is_contiguous():
        return compiled_gate(gate_up, gelu=False, swiglu=(alpha, limit))
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * alpha).sigmoid_().mul_(gate).mul_(up + 1)
