"""States in pages: what torch's ways of the kernels read and write, and the check of which pages those are."""

import torch

from ..checks import require, require_index
from ..types import StateChunks, StateRows


def require_pages(op: str, rows: StateRows | StateChunks) -> None:
    """Raise KernelArgumentError where a column is no contiguous int64 [N]."""
    for name, column in rows._asdict().items():
        if column is not None:
            require_index(op, name, column, 1)
            require(column.dtype is torch.int64 and column.is_contiguous(), op, name, "must be contiguous int64")


def read_pages(tensor: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[S, ...] of a tensor [P, ...]; zeros for page 0."""
    return torch.where((pages > 0).view(-1, *(1,) * (tensor.dim() - 1)), tensor.index_select(0, pages), 0.0)


def write_pages(tensor: torch.Tensor, pages: torch.Tensor, made: torch.Tensor) -> None:
    """Put [S, ...] into these pages of a tensor [P, ...], but not into page 0."""
    is_there = pages > 0
    tensor.index_copy_(0, pages[is_there], made[is_there])
