"""What the cases of part b share: the error of a result, rows of queries, a pool with far blocks, and moves between tiers."""

import torch

from kvkeeper.engine_service.compute.device.device_queue import make_queue
from kvkeeper.engine_service.ranks.block_copies import SWAP_OUT, BlockMover

FAR_ELEMENTS = 1 << 31
_FEW = 3  # blocks before them in a rehearsal, which has no room for more


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, in units of what is expected where that is beyond one; infinite where one of both is not a number."""
    difference = (found.cpu().double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
    return float("inf") if bool(difference.isnan().any()) else float(difference.max())


def locs_of(queries: list[int]) -> torch.Tensor:
    """Where the rows of each sequence begin, and the last one ends."""
    return torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def move_there_and_back(mover: BlockMover, device: str) -> tuple[list[int], list[int]]:
    """20 blocks out and in again behind them, on a stream beside the current one. The host's blocks, and orders that failed."""
    queue, failed = make_queue(torch.device(device)), list[int]()
    hosts = [(at * 7) % 40 for at in range(20)]
    out = [(at, SWAP_OUT, at, host) for at, host in enumerate(hosts)]
    back = [(20 + at, SWAP_OUT + 1, host, 20 + at) for at, host in enumerate(hosts)]
    queue.copies.follow()
    queue.copies.submit(lambda: failed.extend(mover.move(out + back)[1]))
    queue.copies.lead()
    queue.mark().wait()
    return hosts, failed


def far_pool(arena: torch.Tensor, device: str, fewest_elements: int = FAR_ELEMENTS) -> tuple[torch.Tensor, int]:
    """Blocks of a small arena at the far end of a pool so large that offsets into it do not fit 32 bits.

    Returns a pool on the device, and the block of it from which on it has the arena's blocks [num_blocks, ...].

    fewest_elements: of the arena's type, before them. On a CPU there are few.
    """
    far = _FEW if device == "cpu" else fewest_elements // arena[0].numel() + 1
    pool = torch.empty((far + len(arena), *arena.shape[1:]), dtype=arena.dtype, device=device)
    pool[far:] = arena.to(device)
    return pool, far
