"""copy_blocks on CUDA, and the kernel that gather_blocks and scatter_blocks share: whole blocks, 16 bytes a thread and access.

A block is contiguous over all layers, so one launch moves any number of blocks, each in chunks over many programs.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_CHUNK_BYTES = 8192  # of one program
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit(do_not_specialize=["num_chunks"])
def move_blocks_kernel(source_ptr, target_ptr, source_ids_ptr, target_ids_ptr, block_words, num_chunks, CHUNK: tl.constexpr):
    """Copy source[source_ids[i]] to target[target_ids[i]], chunk by chunk; ids that are None are i."""
    program = tl.program_id(0).to(tl.int64)
    pair, chunk = program // num_chunks, program % num_chunks
    source, target = pair, pair
    if source_ids_ptr is not None:
        source = tl.load(source_ids_ptr + pair).to(tl.int64)
    if target_ids_ptr is not None:
        target = tl.load(target_ids_ptr + pair).to(tl.int64)
    words = chunk * CHUNK + tl.arange(0, CHUNK)
    live = words < block_words
    moved = tl.load(source_ptr + source * block_words + words, mask=live)
    tl.store(target_ptr + target * block_words + words, moved, mask=live)


def move_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    num_blocks: int,
) -> None:
    """Copy num_blocks blocks [block...] between two contiguous tensors [n, block...]; see the kernel.

    No block that is written may be read or written by another pair: programs run in any order.
    """
    source, target = _as_words(source), _as_words(target)
    block_words = source.shape[1]
    chunk = _CHUNK_BYTES // source.element_size()
    num_chunks = triton.cdiv(block_words, chunk)
    move_blocks_kernel[(num_blocks * num_chunks,)](
        source, target, source_ids, target_ids, block_words, num_chunks, CHUNK=chunk, num_warps=4
    )


def copy_blocks(arena: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies that may run in any order, see move_blocks."""
    ids = torch.tensor(pairs, dtype=torch.int64).t().contiguous().to(arena.device, non_blocking=True)
    move_blocks(arena, arena, ids[0], ids[1], len(pairs))


def _as_words(blocks: torch.Tensor) -> torch.Tensor:
    """[n, words] of the widest integers that a block is a whole number of."""
    raw = blocks.view(blocks.shape[0], -1).view(torch.uint8)
    return raw.view(next(word for word in _WORDS if raw.shape[1] % word.itemsize == 0))
