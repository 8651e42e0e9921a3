"""Tensors that say they are on CUDA: the wrappers send them to the kernels. Data lies on the CPU, or nowhere (meta)."""

import torch


class PretendCuda(torch.Tensor):
    """A CPU or meta tensor whose views, and what torch makes of it, also claim to be on CUDA."""

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)


def on_cuda(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same memory, claiming to be on CUDA."""
    return [tensor.as_subclass(PretendCuda) for tensor in tensors]


def nowhere(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of any size without memory, claiming to be on CUDA: for launches that are compiled, not run."""
    return torch.empty(shape, dtype=dtype, device="meta").as_subclass(PretendCuda)
