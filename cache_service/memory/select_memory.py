"""The allocator of arenas for a configured device, and that of a memory directory."""

from pathlib import Path

from kvkeeper.common.cuda.runtime import cuda_runtime
from kvkeeper.common.cuda.vmm import vmm_driver

from .device.cuda import CudaMemory
from .device.held_memory import HeldMemory
from .kept.kept_memory import FileMemory, KeptMemory
from .shared_memory import SharedMemory


def make_memory(device: str) -> SharedMemory | CudaMemory:
    """device: "cpu", "cuda" or "cuda:N". Raises CudaError where there is no such device."""
    if device == "cpu":
        return SharedMemory()
    return CudaMemory(cuda_runtime(), _index(device))


def make_kept_memory(device: str, holder: str, folder: Path) -> KeptMemory:
    """The same for the memory directory at this folder. holder: the address of what holds the memory of a CUDA device."""
    if device == "cpu":
        return FileMemory()
    return HeldMemory(cuda_runtime(), vmm_driver(), _index(device), holder, folder)


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)
