"""far_pool: blocks of a small arena at the far end of a pool so large that offsets into it do not fit 32 bits."""

import torch

FAR_ELEMENTS = 1 << 31
_FEW = 3  # blocks before them in a rehearsal, which has no room for more


def far_pool(arena: torch.Tensor, device: str, fewest_elements: int = FAR_ELEMENTS) -> tuple[torch.Tensor, int]:
    """A pool on the device, and the block of it from which on it has the arena's blocks [num_blocks, ...].

    fewest_elements: of the arena's type, before them. On a CPU there are few.
    """
    far = _FEW if device == "cpu" else fewest_elements // arena[0].numel() + 1
    pool = torch.empty((far + len(arena), *arena.shape[1:]), dtype=arena.dtype, device=device)
    pool[far:] = arena.to(device)
    return pool, far
