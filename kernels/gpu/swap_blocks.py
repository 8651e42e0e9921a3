"""gather_blocks and scatter_blocks on CUDA: one launch where both ends are on the device, and to or from the host one
asynchronous copy for each run of blocks that follow each other at both ends.

A block is contiguous over all layers, half a megabyte or more for most models: the copy engine moves such pieces at the
speed of the link, and leaves the multiprocessors to the model. Small blocks are gathered on the device first: copies of less
than about 28 KiB each are an order of magnitude slower than the link.
"""

from collections.abc import Iterator, Sequence

import torch

from .copy_blocks import move_blocks

_SMALL_BYTES = 28 << 10


def gather_blocks(arena: torch.Tensor, block_ids: Sequence[int], staged: torch.Tensor) -> None:
    """See kernels.gather_blocks.gather_blocks."""
    if not block_ids:
        return
    if staged.is_cuda:
        move_blocks(arena, staged, _on_device(block_ids, arena), None, len(block_ids))
    elif _block_bytes(arena) < _SMALL_BYTES:
        gathered = torch.empty(staged.shape, dtype=arena.dtype, device=arena.device)
        move_blocks(arena, gathered, _on_device(block_ids, arena), None, len(block_ids))
        staged.copy_(gathered, non_blocking=True)
    else:
        for first, last in runs_of(block_ids):
            begin = block_ids[first]
            staged[first:last].copy_(arena[begin : begin + last - first], non_blocking=True)


def scatter_blocks(staged: torch.Tensor, block_ids: Sequence[int], arena: torch.Tensor) -> None:
    """See kernels.scatter_blocks.scatter_blocks."""
    if not block_ids:
        return
    if staged.is_cuda:
        move_blocks(staged, arena, None, _on_device(block_ids, arena), len(block_ids))
    elif _block_bytes(arena) < _SMALL_BYTES:
        gathered = staged.to(arena.device, non_blocking=True)
        move_blocks(gathered, arena, None, _on_device(block_ids, arena), len(block_ids))
    else:
        for first, last in runs_of(block_ids):
            begin = block_ids[first]
            arena[begin : begin + last - first].copy_(staged[first:last], non_blocking=True)


def runs_of(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Longest runs [first, last) in which every id is one more than the one before."""
    first = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            yield first, index
            first = index


def _on_device(block_ids: Sequence[int], arena: torch.Tensor) -> torch.Tensor:
    return torch.tensor(block_ids, dtype=torch.int64).to(arena.device, non_blocking=True)


def _block_bytes(arena: torch.Tensor) -> int:
    return arena.stride(0) * arena.element_size()
