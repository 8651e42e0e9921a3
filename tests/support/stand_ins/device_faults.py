"""Errors of a CUDA device as torch and Triton raise them, made without a device."""

import torch

_SHORT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.18 GiB of which 640.50 MiB is free."
    " Including non-PyTorch memory, this process has 78.50 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by"
    " PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)
_ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)


def out_of_memory() -> RuntimeError:
    """Of torch's allocator."""
    return torch.OutOfMemoryError(_SHORT)


def accelerator_error(number: int, words: str = "an illegal memory access was encountered") -> RuntimeError:
    """Of a call of the runtime; torch sets the number where it makes the error."""
    error = torch.AcceleratorError(f"CUDA error: {words}{_ADVICE}")
    error.error_code = number  # type: ignore[attr-defined]
    return error


def triton_error(words: str) -> RuntimeError:
    """Of a launch, in the driver's words alone."""
    return RuntimeError(f"Triton Error [CUDA]: {words}")
