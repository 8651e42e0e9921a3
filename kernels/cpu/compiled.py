"""The switch of the compiled kernels: off until they are loaded.

Owns whether they are on, which is a fact of the process, as a device is. They serve float32 on a CPU; other dtypes are torch's,
because numba computes in none of them.
"""

import importlib
from importlib.util import find_spec
from types import ModuleType

import torch

_kernels: ModuleType | None = None


def is_installed() -> bool:
    """Whether numba is, of the extra `cpu`."""
    return find_spec("numba") is not None


def switch(*, on: bool) -> None:
    """Turn the kernels on, or off. The first time takes seconds where no earlier process has left them on disk.

    Raises ImportError where numba is not installed.
    """
    global _kernels
    _kernels = importlib.import_module(".kernels", __package__) if on else None


def are_kept() -> bool:
    """Whether the kernels are on disk for the next process: beside the code, or in the user's cache directory."""
    return _kernels is not None and bool(_kernels.ARE_KEPT)


def serves(tensor: torch.Tensor) -> bool:
    """Whether the compiled kernels are on and compute on this tensor."""
    return _kernels is not None and tensor.dtype is torch.float32 and tensor.is_cpu


def kernel(name: str) -> int:
    """The address of a kernel, which is a C function of one pointer."""
    address: int = getattr(_kernels, name).address
    return address
