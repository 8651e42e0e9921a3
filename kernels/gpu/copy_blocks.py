"""copy_blocks on CUDA: whole blocks, 16 bytes a thread and access.

A block is contiguous over all layers, so one launch copies any number of blocks, each in chunks over many programs. Source and
target may be two memories: a device reads and writes pinned memory of the host by the same addresses.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .sizes import cdiv

_CHUNK_BYTES = 8192  # of one program
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit(do_not_specialize=["num_chunks"])
def copy_blocks_kernel(
    source_ptr,
    target_ptr,
    pairs_ptr,
    source_stride,
    target_stride,
    block_words,
    num_chunks,
    CHUNK: tl.constexpr,
):
    """Copy block pairs[i, 0] of the source to block pairs[i, 1] of the target, chunk by chunk. Strides are in words."""
    program = tl.program_id(0).to(tl.int64)
    pair, chunk = program // num_chunks, program % num_chunks
    source = tl.load(pairs_ptr + pair * 2).to(tl.int64)
    target = tl.load(pairs_ptr + pair * 2 + 1).to(tl.int64)
    words = chunk * CHUNK + tl.arange(0, CHUNK)
    live = words < block_words
    copied = tl.load(source_ptr + source * source_stride + words, mask=live)
    tl.store(target_ptr + target * target_stride + words, copied, mask=live)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks from one tensor [num_blocks, block...] to another, or to itself; a block is contiguous.

    No block that is written may be read or written by another pair: programs run in any order. Sources and targets are one
    tensor of ids: the second of two columns would be at a multiple of 16 bytes for some numbers of pairs, and not for others.
    """
    device = source.device if source.device.type == "cuda" else target.device
    ids = torch.tensor(pairs, dtype=torch.int64)
    if device.type == "cuda":  # from memory that is not pinned, the host would wait for the copy
        ids = ids.pin_memory()
    ids = ids.to(device, non_blocking=True)
    sources, targets = _as_words(source), _as_words(target)
    block_words = sources.shape[1]
    chunk = _CHUNK_BYTES // sources.element_size()
    num_chunks = cdiv(block_words, chunk)
    strides = sources.stride(0), targets.stride(0)
    copy_blocks_kernel[(len(pairs) * num_chunks,)](
        sources, targets, ids, *strides, block_words, num_chunks, CHUNK=chunk, num_warps=4
    )


def _as_words(blocks: torch.Tensor) -> torch.Tensor:
    """[n, words] of the widest integers that a block, and its distance to the next one, are a whole number of."""
    raw = blocks.flatten(1).view(torch.uint8)
    word = next(word for word in _WORDS if raw.shape[1] % word.itemsize == 0 and raw.stride(0) % word.itemsize == 0)
    return raw.view(word)
