"""copy_blocks: run an ordered list of whole-block copies (copy-on-write).

Order matters: with (1, 2), (2, 3) block 3 receives what block 1 held. Pairs that do not touch what earlier ones wrote
run as one gather and one scatter; a dependency ends such a run.
"""

from collections.abc import Iterator, Sequence

import torch

from kernels.checks import require, require_cpu

_OP = "copy_blocks"


def copy_blocks(arena: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks, in place and in order; a later pair sees what earlier ones wrote.

    Args:
        arena: [num_blocks, ...], block-major and contiguous: one row is a block over all layers.
        pairs: (source block id, destination block id). The destination is never the null block.

    Raises:
        KernelArgumentError: an id outside the arena, the null block as a destination, or an arena with gaps.
        UnsupportedDeviceError: not on a CPU.
    """
    require_cpu(_OP, arena)
    require(arena.is_contiguous(), _OP, "arena", "must be contiguous, so that a block is one row")
    num_blocks = arena.shape[0]
    for source, destination in pairs:
        inside = 0 <= source < num_blocks and 0 < destination < num_blocks
        require(inside, _OP, "pairs", "hold ({}, {}) for {} blocks", source, destination, num_blocks)
    for run in _independent_runs(pairs):
        if len(run) == 1:  # most copy-on-writes: no index tensors, no temporary
            arena[run[0][1]].copy_(arena[run[0][0]])
            continue
        index = torch.tensor(run, dtype=torch.int64)
        arena.index_copy_(0, index[:, 1], arena.index_select(0, index[:, 0]))


def _independent_runs(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut `pairs` into longest runs in which no pair reads or writes what an earlier one of the run wrote."""
    run: list[tuple[int, int]] = []
    written: set[int] = set()
    for source, destination in pairs:
        if source in written or destination in written:
            yield run
            run, written = [], set()
        run.append((source, destination))
        written.add(destination)
    if run:
        yield run
