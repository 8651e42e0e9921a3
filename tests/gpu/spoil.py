"""spoil_freed: NaN in all memory of a device that nothing of this process owns, so that an address of what was freed shows.

What torch has freed and still has is written in its place, also in segments that hold other tensors. Then torch gives back what
it can: an address there is mapped no more, or is that of the NaN that is put into what the driver has free.
"""

import gc
from dataclasses import dataclass

import torch

_NAN = 0xFF  # every byte: NaN in all formats, and -1 as an integer
_LEFT = 1 << 30  # bytes, for the driver's own needs
_COMMON_POOL = (0, 0)  # that graphs' own memory is not in: it is theirs while it is free


@dataclass(frozen=True, slots=True)
class _Bytes:
    pointer: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}


def tensor_at(pointer: int, num_bytes: int) -> torch.Tensor:
    """Device memory that this process has mapped, as torch sees it by public interfaces only: uint8 [num_bytes], no copy."""
    return torch.as_tensor(_Bytes(pointer, num_bytes), device="cuda")


def spoil_freed(device: torch.device) -> int:
    """Bytes that were written. Nothing of this process may be under way on other streams afterwards."""
    gc.collect()
    torch.cuda.synchronize(device)
    num_bytes = 0
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment["segment_pool_id"]) != _COMMON_POOL or segment["device"] != (device.index or 0):
            continue
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                tensor_at(block["address"], block["size"]).fill_(_NAN)
                num_bytes += block["size"]
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free > _LEFT:
        torch.empty(free - _LEFT, dtype=torch.uint8, device=device).fill_(_NAN)
        num_bytes += free - _LEFT
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return num_bytes
