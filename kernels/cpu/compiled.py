"""The switch of the compiled kernels: off until they are loaded.

Owns whether they are on, which is a fact of the process, as a device is. They serve float32 on a CPU; other dtypes are torch's,
because numba computes in none of them.
"""

import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import Final

import torch

_MODULES: Final = (".row_kernels", ".attention_kernels")
_kernels: tuple[ModuleType, ...] | None = None


def is_installed() -> bool:
    """Whether numba is, of the extra `cpu`."""
    return find_spec("numba") is not None


def switch(*, on: bool) -> None:
    """Turn the kernels on, or off. The first time takes seconds where no earlier process has left them on disk.

    Raises ImportError where numba is not installed.
    """
    global _kernels
    _kernels = tuple(importlib.import_module(name, __package__) for name in _MODULES) if on else None


def are_kept() -> bool:
    """Whether the kernels are on disk for the next process: beside the code, or in the user's cache directory."""
    return _kernels is not None and bool(importlib.import_module(".kernel_parts", __package__).ARE_KEPT)


def serves(tensor: torch.Tensor) -> bool:
    """Whether the compiled kernels are on and compute on this tensor."""
    return _kernels is not None and tensor.dtype is torch.float32 and tensor.is_cpu


def kernel(name: str) -> int:
    """The address of a kernel, which is a C function of one pointer."""
    assert _kernels is not None, "switched on"
    address: int = next(getattr(module, name) for module in _kernels if hasattr(module, name)).address
    return address
