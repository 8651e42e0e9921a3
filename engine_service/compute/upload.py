"""Upload: a step's arrays on their way to where the model computes, all in one copy.

On a CPU the arrays are taken as they are. For a CUDA device they are put one behind the other into pinned memory, which one
asynchronous copy takes over; what the model gets are views of it. The pinned memory is used again with the next step, which is
safe because each step ends by waiting for the tokens it has drawn.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Arrays = Mapping[str, npt.NDArray[np.integer]]
_ALIGNMENT = 16  # bytes; the widest access of a kernel


class Upload(Protocol):
    """Arrays in, tensors of the same names out."""

    def __call__(self, arrays: Arrays) -> dict[str, torch.Tensor]: ...


def upload_to(memory: torch.Tensor) -> Upload:
    """To the device that this memory is on."""
    return PackedUpload(memory.device, pin_memory=memory.device.type == "cuda") if memory.is_cuda else as_they_are


def as_they_are(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Tensors of the arrays' own memory."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def at_device(array: npt.NDArray[Any], beside: torch.Tensor) -> torch.Tensor:
    """The array where the other tensor is; the host does not wait. Each call is a copy of its own, so put arrays together."""
    tensor = torch.from_numpy(array)
    if beside.device.type == "cuda":  # torch keeps the pinned memory until the copy has read it
        tensor = tensor.pin_memory()
    return tensor.to(beside.device, non_blocking=True)


class PackedUpload:
    """Uploads to a device through pinned memory, in one copy."""

    def __init__(self, device: torch.device, *, pin_memory: bool) -> None:
        self._device = device
        self._pin_memory = pin_memory
        self._staging = torch.empty(0, dtype=torch.uint8)

    def __call__(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """See Upload."""
        firsts, num_bytes = [], 0
        for array in arrays.values():
            firsts.append(num_bytes)
            num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if num_bytes > self._staging.numel():
            self._staging = torch.empty(1 << num_bytes.bit_length(), dtype=torch.uint8, pin_memory=self._pin_memory)
        raw = self._staging.numpy()
        for first, array in zip(firsts, arrays.values(), strict=True):
            raw[first : first + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        # copy: on a CPU, where this is tried out, the memory would be the same.
        on_device = self._staging[:num_bytes].to(self._device, non_blocking=True, copy=True)
        tensors = {}
        for first, (name, array) in zip(firsts, arrays.items(), strict=True):
            part = on_device[first : first + array.nbytes]
            tensors[name] = part.view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        return tensors
