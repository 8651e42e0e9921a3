"""scatter_blocks: the way back of gather_blocks, from contiguous memory to blocks anywhere in an arena."""

from collections.abc import Sequence

import torch

from .checks import on_cuda, require
from .gather_blocks import require_staged
from .layout import NULL_BLOCK_ID

_OP = "scatter_blocks"


def scatter_blocks(staged: torch.Tensor, block_ids: Sequence[int], arena: torch.Tensor) -> None:
    """Copy staged[i] to arena[block_ids[i]], in place.

    Args:
        staged, arena: see gather_blocks. Pinned memory must stay as it is until the current stream has done the copies.
        block_ids: of blocks in the arena, none twice, none the null block.

    Raises:
        KernelArgumentError: see gather_blocks; or an id twice, or the null block's.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    require_staged(_OP, arena, block_ids, staged)
    distinct = len(set(block_ids)) == len(block_ids) and NULL_BLOCK_ID not in block_ids
    require(distinct, _OP, "block_ids", "must be distinct, and not the null block's")
    if not on_cuda(_OP, arena):
        arena.index_copy_(0, torch.tensor(block_ids, dtype=torch.int64), staged)
        return
    from .gpu import swap_blocks as gpu

    gpu.scatter_blocks(staged, block_ids, arena)
