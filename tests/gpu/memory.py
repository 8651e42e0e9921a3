"""tensor_at: device memory that this process has mapped, as torch sees it, by public interfaces only."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class _Bytes:
    pointer: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}


def tensor_at(pointer: int, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], no copy."""
    return torch.as_tensor(_Bytes(pointer, num_bytes), device="cuda")
