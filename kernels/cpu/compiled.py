"""The switch of the compiled kernels: off until they are loaded.

Owns whether they are on, which is a fact of the process, as a device is, and the files of kernels that are loaded. They serve
float32 and bfloat16 on a CPU; other dtypes are torch's.
"""

import importlib
import sys
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

# By the kernel's name the file that it is in.
_OF_EACH_DTYPE: Final = {
    "rms_norm": "row_kernels",
    "gate": "row_kernels",
    "rotary_store_kv": "row_kernels",
    "gated_norm": "row_kernels",
    "weigh_by_sigmoid": "row_kernels",
    "square_of_relu": "row_kernels",
    "add": "row_kernels",
    "multiply": "product_kernels",
    "multiply_experts": "product_kernels",
    "choose": "expert_kernels",
    "mix": "expert_kernels",
    "attend_decode": "attention_kernels",
    "attend_prefill": "attention_kernels",
    "delta_rule": "delta_kernels",
    "short_conv": "conv_kernels",
}
_OF_ONE: Final = {
    "quantise_rows": "integer_kernels",
    "multiply_int8": "integer_kernels",
    "multiply_int4": "integer_kernels",
    "multiply_experts_int8": "integer_kernels",
    "multiply_experts_int4": "integer_kernels",
    "penalise": "penalty_kernels",
    "run_program": "program_kernels",
}
DTYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_is_on = False


def is_installed() -> bool:
    """Whether numba is, of the extra `cpu`."""
    return find_spec("numba") is not None


def switch(*, on: bool) -> None:
    """Turn the kernels on, or off. Raises ImportError where numba is not installed, or does not come up."""
    global _is_on
    if on:
        importlib.import_module(".kernel_parts", __package__)
    _is_on = on


def prepare(dtype: torch.dtype) -> None:
    """Load the kernels of a dtype. The first time takes half a minute where no earlier process has left them on disk."""
    for name in (*_OF_EACH_DTYPE, *_OF_ONE):
        kernel(name, dtype)


def are_kept() -> bool:
    """Whether the kernels are on disk for the next process: beside the code, or in the user's cache directory."""
    return _is_on and bool(importlib.import_module(".kernel_parts", __package__).ARE_KEPT)


def serves(tensor: torch.Tensor) -> bool:
    """Whether the compiled kernels are on and compute on this tensor."""
    return _is_on and tensor.dtype in DTYPES and tensor.is_cpu


def serves_floats(tensor: torch.Tensor) -> bool:
    """The same of the kernels that compute in float32 alone, as those of stored K and V do."""
    return serves(tensor) and tensor.dtype is torch.float32


def kernel(name: str, dtype: torch.dtype) -> int:
    """The address of a kernel, which is a C function of one pointer. dtype: what it computes on, where that is a choice."""
    assert _is_on, "switched on"
    file = _OF_EACH_DTYPE.get(name)
    found: Any = load_kernels(_OF_ONE[name], "") if file is None else load_kernels(file, DTYPES[dtype])
    address: int = getattr(found, name).address
    return address


@cache
def load_kernels(file: str, kind: str) -> ModuleType:
    """A file of kernels as a module whose name ends in the kind of number that it is for; '': in none.

    Such a file is loaded once for each kind, so that a loop has the reading of its numbers inside and nothing of others.
    Raises ImportError where numba is not installed.
    """
    name = f"{__package__}.{file}" + (f"_{kind}" if kind else "")
    spec = spec_from_file_location(name, Path(__file__).parent / f"{file}.py")
    assert spec is not None, "of a Python file"
    assert spec.loader is not None, "of a Python file"
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
