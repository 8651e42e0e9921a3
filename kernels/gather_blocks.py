"""gather_blocks: collect blocks that lie anywhere in an arena in contiguous memory, as swapping them out wants them."""

from collections.abc import Sequence

import torch

from .checks import on_cuda, require

_OP = "gather_blocks"


def gather_blocks(arena: torch.Tensor, block_ids: Sequence[int], staged: torch.Tensor) -> None:
    """Copy arena[block_ids[i]] to staged[i], in place.

    Args:
        arena: [num_blocks, ...], block-major and contiguous: one row is a block over all layers.
        block_ids: of blocks in the arena.
        staged: [len(block_ids), ...], contiguous. With an arena on CUDA it is there too, or in pinned memory of the host: then
            the copies are queued, and are done when the current stream is.

    Raises:
        KernelArgumentError: ids outside the arena, or memory that does not fit, has gaps or is not pinned.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    require_staged(_OP, arena, block_ids, staged)
    if not on_cuda(_OP, arena):
        torch.index_select(arena, 0, torch.tensor(block_ids, dtype=torch.int64), out=staged)
        return
    from .gpu import swap_blocks as gpu

    gpu.gather_blocks(arena, block_ids, staged)


def require_staged(op: str, arena: torch.Tensor, block_ids: Sequence[int], staged: torch.Tensor) -> None:
    """Raise KernelArgumentError unless the blocks are in the arena and staged has room for just them."""
    require(arena.is_contiguous(), op, "arena", "must be contiguous, so that a block is one row")
    num_blocks = arena.shape[0]
    inside = all(0 <= block_id < num_blocks for block_id in block_ids)
    require(inside, op, "block_ids", "name blocks outside the arena of {}", num_blocks)
    shape = (len(block_ids), *arena.shape[1:])
    fits = staged.shape == shape and staged.dtype == arena.dtype and staged.is_contiguous()
    require(fits, op, "staged", "must be contiguous {} {}, is {} {}", arena.dtype, shape, staged.dtype, staged.shape)
    reachable = arena.is_cuda == staged.is_cuda or staged.is_pinned()
    require(reachable, op, "staged", "must be on the arena's device or pinned")
