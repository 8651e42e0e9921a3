"""copy_blocks: run an ordered list of whole-block copies (copy-on-write), and move_blocks: copies between two memories.

Order matters: with (1, 2), (2, 3) block 3 receives the contents of block 1. Independent pairs run together, in one gather and
one scatter or in one launch; a dependency ends such a run.
"""

from collections.abc import Iterator, Sequence

import torch

from .checks import on_cuda, require
from .errors import UnsupportedDeviceError

_OP = "copy_blocks"
_MOVE = "move_blocks"


def copy_blocks(arena: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks, in place and in order; a later pair sees the writes of earlier pairs.

    Args:
        arena: [num_blocks, ...], block-major and contiguous: one row is a block over all layers.
        pairs: (source block id, destination block id). The destination is never the null block.

    Raises:
        KernelArgumentError: an id outside the arena, the null block as a destination, or an arena with gaps.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, arena)
    require(arena.is_contiguous(), _OP, "arena", "must be contiguous, so that a block is one row")
    num_blocks = arena.shape[0]
    for source, destination in pairs:
        inside = 0 <= source < num_blocks and 0 < destination < num_blocks
        require(inside, _OP, "pairs", "hold ({}, {}) for {} blocks", source, destination, num_blocks)
    if cuda:
        from .gpu import copy_blocks as gpu

        for run in independent_runs(pairs, at_once=True):
            gpu.copy_blocks(arena, arena, run)
        return
    for run in independent_runs(pairs):
        if len(run) == 1:  # most copy-on-writes: no index tensors, no temporary
            arena[run[0][1]].copy_(arena[run[0][0]])
            continue
        index = torch.tensor(run, dtype=torch.int64)
        arena.index_copy_(0, index[:, 1], arena.index_select(0, index[:, 0]))


def move_blocks(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks between a device and pinned memory of the host, in one launch.

    Args:
        source, target: [num_blocks, ...], a block contiguous, of equal size in both; one of them on CUDA.
        pairs: (block id in source, block id in target). No target twice.

    Raises:
        KernelArgumentError: an id outside, blocks of different sizes or with gaps, a target twice.
        UnsupportedDeviceError: neither is on CUDA.
    """
    if not (source.is_cuda or target.is_cuda):
        raise UnsupportedDeviceError(_MOVE, f"{source.device} and {target.device}")
    require(source[0].is_contiguous() and target[0].is_contiguous(), _MOVE, "blocks", "must be contiguous")
    require(source[0].nbytes == target[0].nbytes, _MOVE, "blocks", "have {} and {} bytes", source[0].nbytes, target[0].nbytes)
    for source_id, target_id in pairs:
        inside = 0 <= source_id < len(source) and 0 <= target_id < len(target)
        require(inside, _MOVE, "pairs", "hold ({}, {}) for {} and {} blocks", source_id, target_id, len(source), len(target))
    require(len({target_id for _, target_id in pairs}) == len(pairs), _MOVE, "pairs", "name a target twice")
    if pairs:
        from .gpu import copy_blocks as gpu

        gpu.copy_blocks(source, target, pairs)


def independent_runs(pairs: Sequence[tuple[int, int]], *, at_once: bool = False) -> Iterator[list[tuple[int, int]]]:
    """Cut `pairs` into longest runs in which no pair reads or writes a block that an earlier pair of the run wrote.

    at_once: the pairs of a run are copied in any order, so no pair may write a block that an earlier pair read either. Runs
    whose reads all come before their writes do not need that.
    """
    run: list[tuple[int, int]] = []
    written: set[int] = set()
    read: set[int] = set()
    for source, destination in pairs:
        if source in written or destination in written or (at_once and destination in read):
            yield run
            run, written, read = [], set(), set()
        run.append((source, destination))
        written.add(destination)
        read.add(source)
    if run:
        yield run
