"""gelu_and_mul: the GeGLU gate, gelu(gate) * up with the tanh approximation, of a fused projection (arXiv 2002.05202)."""

import torch

from ..checks import on_cuda, require
from ..cpu import compiled
from ..cpu.rows import gate as compiled_gate

_OP = "gelu_and_mul"


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up [..., I] of gate_up [..., 2 * I], gate first.

    Raises:
        KernelArgumentError: an odd last dimension, or, on CUDA, gaps.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, gate_up)
    require(gate_up.shape[-1] % 2 == 0, _OP, "gate_up", "must have an even last dimension, is {}", gate_up.shape)
    if cuda:
        from ..gpu.gates import gate as gate_on_cuda

        require(gate_up.is_contiguous(), _OP, "gate_up", "must be contiguous")
        return gate_on_cuda(gate_up, gelu=True)
    if compiled.serves(gate_up) and gate_up.is_contiguous():
        return compiled_gate(gate_up, gelu=True)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)
