"""copy_blocks on CUDA: whole blocks, 16 bytes a thread and access.

A block is contiguous over all layers, so one launch copies any number of blocks, each in chunks over many programs.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .sizes import cdiv

_CHUNK_BYTES = 8192  # of one program
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit(do_not_specialize=["num_chunks"])
def copy_blocks_kernel(arena_ptr, source_ids_ptr, target_ids_ptr, block_words, num_chunks, CHUNK: tl.constexpr):
    """Copy block source_ids[i] of the arena to block target_ids[i], chunk by chunk."""
    program = tl.program_id(0).to(tl.int64)
    pair, chunk = program // num_chunks, program % num_chunks
    source = tl.load(source_ids_ptr + pair).to(tl.int64)
    target = tl.load(target_ids_ptr + pair).to(tl.int64)
    words = chunk * CHUNK + tl.arange(0, CHUNK)
    live = words < block_words
    copied = tl.load(arena_ptr + source * block_words + words, mask=live)
    tl.store(arena_ptr + target * block_words + words, copied, mask=live)


def copy_blocks(arena: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks of a contiguous arena [num_blocks, block...].

    No block that is written may be read or written by another pair: programs run in any order.
    """
    ids = torch.tensor(pairs, dtype=torch.int64).t().contiguous().to(arena.device, non_blocking=True)
    blocks = _as_words(arena)
    block_words = blocks.shape[1]
    chunk = _CHUNK_BYTES // blocks.element_size()
    num_chunks = cdiv(block_words, chunk)
    copy_blocks_kernel[(len(pairs) * num_chunks,)](blocks, ids[0], ids[1], block_words, num_chunks, CHUNK=chunk, num_warps=4)


def _as_words(blocks: torch.Tensor) -> torch.Tensor:
    """[n, words] of the widest integers that a block is a whole number of."""
    raw = blocks.view(blocks.shape[0], -1).view(torch.uint8)
    return raw.view(next(word for word in _WORDS if raw.shape[1] % word.itemsize == 0))
