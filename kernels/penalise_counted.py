"""penalise_counted: logits less penalties, from counts of the tokens before, which get each row's newest token on the way.

Counts stay where they are from step to step: a row's history is never read again. A cell is twice the number of times that its
token is in the output, and one more where it is in the prompt.
"""

from typing import Final

import torch

from .checks import on_cuda, require
from .types import CountedTensors

_OP: Final = "penalise_counted"
ONE_MORE: Final = 2  # what a token of the output adds to its cell
IN_PROMPT: Final = 1
COUNT_DTYPES: Final = (torch.int16, torch.int32)


def penalise_counted(logits: torch.Tensor, counts: torch.Tensor, rows: CountedTensors) -> torch.Tensor:
    """Count one token for each row, then penalise its logits; see SamplingParams for what penalties do.

    Args:
        logits: float32 [R, V], not changed; contiguous in its last dimension.
        counts: int16 or int32 [N, V], contiguous; changed.
        rows: of the logits, in their order.

    Returns:
        float32 [R, V], in memory of its own.

    Raises:
        KernelArgumentError: a shape, stride or dtype that does not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, logits)
    fits = logits.dim() == 2 and logits.dtype is torch.float32 and logits.stride(1) == 1
    require(fits, _OP, "logits", "must be float32 [R, V], is {} {}", logits.dtype, logits.shape)
    num_rows, vocab_size = logits.shape
    fits = counts.dim() == 2 and counts.shape[1] == vocab_size and counts.dtype in COUNT_DTYPES and counts.is_contiguous()
    require(fits, _OP, "counts", "must be contiguous int16 or int32 [N, {}], is {} {}", vocab_size, counts.dtype, counts.shape)
    slots, tokens, addends, penalties = rows
    for name, column in (("slots", slots), ("tokens", tokens), ("addends", addends)):
        fits = column.shape == (num_rows,) and column.dtype is torch.int64 and column.is_contiguous()
        require(fits, _OP, name, "must be contiguous int64 [{}], is {} {}", num_rows, column.dtype, column.shape)
    fits = penalties.shape == (3, num_rows) and penalties.dtype is torch.float64 and penalties.stride(1) == 1
    require(fits, _OP, "penalties", "must be float64 [3, {}], is {} {}", num_rows, penalties.dtype, penalties.shape)
    if cuda:
        from .gpu.penalise_counted import penalise_counted as on_device

        return on_device(logits, counts, rows)
    counts.view(-1).index_add_(0, slots * vocab_size + tokens, addends.to(counts.dtype))
    cells, repetition = counts[slots], penalties[0, :, None].float()
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    values = torch.where(cells > 0, repeated, logits)
    less = (penalties[1, :, None] * (cells >> 1) + penalties[2, :, None]).float()
    return torch.where(cells > 1, values - less, values)
