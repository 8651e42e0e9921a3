"""gelu_and_mul: the GeGLU gate, gelu(gate) * up with the tanh approximation, of a fused projection (arXiv 2002.05202)."""

import torch

from kernels.checks import require, require_cpu

_OP = "gelu_and_mul"


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up [..., I] of gate_up [..., 2 * I], gate first.

    Raises:
        KernelArgumentError: an odd last dimension.
        UnsupportedDeviceError: not on a CPU.
    """
    require_cpu(_OP, gate_up)
    require(gate_up.shape[-1] % 2 == 0, _OP, "gate_up", "must have an even last dimension, is {}", gate_up.shape)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)
