"""Upload: a step's arrays on their way to where the model computes, all in one copy.

On a CPU the arrays are taken as they are. For a CUDA device they are put one behind the other into pinned memory, which one
asynchronous copy takes over; what the model gets are views of it. Two steps may be under way, so there is pinned memory for
two, in turn: what the device has not copied yet is not written over. A step that fails before its copy gives its memory back.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .device_queue import DeviceQueue, Mark

Arrays = Mapping[str, npt.NDArray[np.integer]]
Tensors = dict[str, torch.Tensor]
_ALIGNMENT = 16  # bytes; the widest access of a kernel
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Staged(Generic[T]):
    """What was prepared of a step: to be called once, or given back."""

    compute: Callable[[], T]
    give_back: Callable[[], None] = lambda: None  # what is held for it is free; nothing happens where its copy was made

    def __call__(self) -> T:
        """Gives back, too, where it raises."""
        try:
            return self.compute()
        finally:
            self.give_back()


class Upload(Protocol):
    """Arrays in, and a call that has the tensors of the same names. The arrays may change before it is made."""

    def stage(self, arrays: Arrays) -> Staged[Tensors]: ...


def upload_to(memory: torch.Tensor, queue: DeviceQueue) -> Upload:
    """The upload to the device that this memory is on, which works in this order."""
    is_cuda = memory.device.type == "cuda"
    if queue.is_immediate and not memory.is_cuda:
        return AsTheyAre()
    return PackedUpload(memory.device, queue, pin_memory=is_cuda)


class AsTheyAre:
    """For a processor, which computes at once."""

    def stage(self, arrays: Arrays) -> Staged[Tensors]:
        """See Upload. Tensors of the arrays' own memory."""
        return Staged(lambda: {name: torch.from_numpy(array) for name, array in arrays.items()})


def at_device(array: npt.NDArray[Any], beside: torch.Tensor) -> torch.Tensor:
    """The array where the other tensor is; the host does not wait. Each call is a copy of its own, so put arrays together."""
    tensor = torch.from_numpy(array)
    if beside.device.type == "cuda":  # torch keeps the pinned memory until the copy has read it
        tensor = tensor.pin_memory()
    return tensor.to(beside.device, non_blocking=True)


class Stage:
    """Memory that a step's copy to the device reads; it is the step's until the copy was made."""

    def __init__(self, num_bytes: int, *, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._copied: Mark | None = None
        self._is_filled = False
        self.memory = self._new(num_bytes)

    def reuse(self, num_bytes: int = 0) -> torch.Tensor:
        """The memory, uint8, at least so many bytes, for another step."""
        assert not self._is_filled, "at most two steps are under way"
        if self._copied is not None:
            self._copied.wait()
        if num_bytes > self.memory.numel():
            self.memory = self._new(1 << num_bytes.bit_length())
        self._is_filled = True
        return self.memory

    def note_copied(self, mark: Mark) -> None:
        """The copy was launched; once the mark is passed it has read the memory."""
        self._copied, self._is_filled = mark, False

    def give_back(self) -> None:
        """No copy comes of what it was filled with; nothing happens where one was made."""
        self._is_filled = False

    def _new(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)


class PackedUpload:
    """Uploads to a device through pinned memory, in one copy."""

    def __init__(self, device: torch.device, queue: DeviceQueue, *, pin_memory: bool) -> None:
        self._device, self._queue = device, queue
        self._stages = [Stage(0, pin_memory=pin_memory) for _ in range(2)]

    def stage(self, arrays: Arrays) -> Staged[Tensors]:
        """See Upload."""
        firsts, num_bytes = [], 0
        for array in arrays.values():
            firsts.append(num_bytes)
            num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._stages.reverse()
        stage = self._stages[0]
        memory = stage.reuse(num_bytes)
        raw = memory.numpy()
        for first, array in zip(firsts, arrays.values(), strict=True):
            raw[first : first + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        shapes = {
            name: (first, array.nbytes, array.shape, array[:0])
            for first, (name, array) in zip(firsts, arrays.items(), strict=True)
        }

        def copy() -> Tensors:
            # copy: on a CPU, where this is tried out, the memory would be the same.
            on_device = memory[:num_bytes].to(self._device, non_blocking=True, copy=True)
            stage.note_copied(self._queue.mark())
            return {
                name: on_device[first : first + size].view(torch.from_numpy(empty).dtype).view(shape)
                for name, (first, size, shape, empty) in shapes.items()
            }

        return Staged(copy, stage.give_back)
