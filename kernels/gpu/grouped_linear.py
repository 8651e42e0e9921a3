"""grouped_linear on CUDA: one launch over all groups of rows, each a matrix product with its own weight.

A program takes a tile of rows of one group and a tile of outputs. Which group follows from where the groups begin, on the
device: the grid follows from shapes alone, so the launch can be captured, and the host waits for nothing. Few rows to a group,
as in decode, is bound by reading weights; many rows, as in prefill, by arithmetic; the tile of rows is chosen by their mean.
"""

import torch
import triton
import triton.language as tl

from .attention_tiles import COMPUTE_TYPES
from .sizes import cdiv
from .variants import group_rows

GROUPS_AT_ONCE = 256


@triton.jit
def find_rows(starts_ptr, num_groups, program, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """The group of a program, the first of its rows, and the end of the group's; a program too many begins at the end or later.

    Group g has the programs from starts[g] // ROWS + g on, at least as many as it needs.
    """
    num_begun = 0
    for first in range(0, num_groups, GROUPS):
        groups = first + tl.arange(0, GROUPS)
        starts = tl.load(starts_ptr + groups, mask=groups < num_groups, other=0)
        num_begun += tl.sum(((starts // ROWS + groups <= program) & (groups < num_groups)).to(tl.int32), 0)
    group = num_begun - 1
    start, end = tl.load(starts_ptr + group), tl.load(starts_ptr + group + 1)
    return group, start + (program - start // ROWS - group) * ROWS, end


@triton.jit(do_not_specialize=["num_groups"])
def grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    starts_ptr,
    out_ptr,
    num_groups,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """ROWS rows of one group by COLS outputs, DEPTH inputs at a time."""
    group, first, end = find_rows(starts_ptr, num_groups, tl.program_id(0), ROWS, GROUPS)
    if first >= end:
        return
    rows = first + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * NUM_IN + depth[None, :]
    weight_ptrs = weight_ptr + (group.to(tl.int64) * NUM_OUT + cols)[:, None] * NUM_IN + depth[None, :]
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for begin in range(0, NUM_IN, DEPTH):
        is_in = (begin + depth < NUM_IN)[None, :]
        x = tl.load(x_ptrs + begin, mask=(rows < end)[:, None] & is_in, other=0.0).to(COMPUTE)
        weight = tl.load(weight_ptrs + begin, mask=(cols < NUM_OUT)[:, None] & is_in, other=0.0).to(COMPUTE)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + group * NUM_OUT + cols, mask=cols < NUM_OUT, other=0.0).to(tl.float32)[None, :]
    wanted = (rows < end)[:, None] & (cols < NUM_OUT)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * NUM_OUT + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=wanted)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor) -> torch.Tensor:
    """The CUDA path of kernels.activations.grouped_linear, with its arguments."""
    num_rows, num_in = x.shape
    num_groups, num_out, _ = weight.shape
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    rows = group_rows(num_rows, num_groups)
    cols = 128 if rows > 16 else 64
    grouped_linear_kernel[num_rows // rows + num_groups, cdiv(num_out, cols)](
        x,
        weight,
        bias,
        starts,
        out,
        num_groups,
        NUM_IN=num_in,
        NUM_OUT=num_out,
        ROWS=rows,
        COLS=cols,
        DEPTH=64,
        GROUPS=GROUPS_AT_ONCE,
        COMPUTE=COMPUTE_TYPES[x.dtype],
        num_warps=8 if rows == 128 else 4,
        num_stages=4,
    )
    return out
