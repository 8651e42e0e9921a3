"""memory_of: where the pools of a configured device are made."""

from cache_service.arena.cuda import CudaMemory
from cache_service.arena.shared_memory import SharedMemory
from kvkeeper.cuda.runtime import cuda_runtime


def memory_of(device: str) -> SharedMemory | CudaMemory:
    """Of "cpu", "cuda" or "cuda:N". Raises CudaError where there is no such device."""
    if device == "cpu":
        return SharedMemory()
    return CudaMemory(cuda_runtime(), int(device.partition(":")[2] or 0))
