"""Retention: the keys that a query of a sequence with sink and window sees, and the query that scores each of them.

Follows StreamingLLM (arXiv 2309.17453). With sink s and window w, the query at position p sees the keys j <= p with j < s or j
> p - w. Keys are stored rotated at their positions in the text. Only distances count for the window, so it is scored with the
query as it is. Sinks that the window has left behind (j < s and j <= p - w) are scored with a query rotated at min(p, s + w -
1) instead: its place among the keys that are left, as if no key had been between them.
"""

from typing import NamedTuple

import numpy as np
import torch

from ..checks import require, require_index
from ..types import Int64Array

Retention = tuple[torch.Tensor, torch.Tensor]  # sink_lens, window_lens: int32 [S], 0 or more; window 0: all is kept


class Kept(NamedTuple):
    """Sinks and windows [S] of the sequences whose last query does not see all keys; 0 for the others."""

    sinks: Int64Array
    windows: Int64Array


def find_kept(op: str, retention: Retention | None, lens: Int64Array) -> Kept | None:
    """What the last queries of sequences of lens [S] tokens see; None where all see all.

    Raises KernelArgumentError for columns that do not fit.
    """
    if retention is None:
        return None
    for name, column in zip(("sink_lens", "window_lens"), retention, strict=True):
        require_index(op, name, column, 1)
        fits = len(column) == len(lens) and int(column.numpy().min(initial=0)) >= 0
        require(fits, op, name, "must be {} lengths, 0 or more", len(lens))
    sinks, windows = (column.numpy().astype(np.int64) for column in retention)
    is_cut = (windows > 0) & (lens > sinks + windows)
    return Kept(np.where(is_cut, sinks, 0), np.where(is_cut, windows, 0)) if is_cut.any() else None


def require_retention(
    op: str, retention: Retention | None, q: torch.Tensor, q_sink: torch.Tensor | None, window: int | None
) -> None:
    """Raise KernelArgumentError unless q_sink comes with retention, is like q, and the model has no window beside it."""
    require((retention is None) == (q_sink is None), op, "q_sink", "and retention come together")
    if q_sink is not None:
        require(window is None, op, "retention", "does not go with a window of the model")
        fits = q_sink.shape == q.shape and q_sink.dtype == q.dtype and q_sink.device == q.device
        require(fits, op, "q_sink", "must be like q, is {} {}", q_sink.dtype, q_sink.shape)
