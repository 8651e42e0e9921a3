"""memory_of: the allocator of arenas for a configured device."""

from kvkeeper.cuda.runtime import cuda_runtime

from .cuda import CudaMemory
from .shared_memory import SharedMemory


def memory_of(device: str) -> SharedMemory | CudaMemory:
    """device: "cpu", "cuda" or "cuda:N". Raises CudaError where there is no such device."""
    if device == "cpu":
        return SharedMemory()
    return CudaMemory(cuda_runtime(), int(device.partition(":")[2] or 0))
