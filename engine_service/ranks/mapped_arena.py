"""A mapped arena as torch sees it: the blocks of a rank on its device, and its shares of the blocks of the host tier."""

import torch

from kvkeeper.client.arena import Arena


def arena_tensor(arena: Arena) -> torch.Tensor:
    """The arena, uint8 [arena_bytes], without a copy."""
    if arena.is_on_device:
        lent = arena.device_bytes()
        return torch.as_tensor(lent, device=torch.device("cuda", lent.device))
    return torch.from_numpy(arena.array)


def host_blocks(arena: Arena, block_bytes: int, rank: int, num_ranks: int) -> torch.Tensor:
    """The rank's share of each block of the host tier, uint8 [num_host_blocks, block_bytes], without a copy."""
    return torch.from_numpy(arena.host_array).view(-1, num_ranks, block_bytes)[:, rank]
