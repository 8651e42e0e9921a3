"""Products with weights of 8 or 4 bits on CUDA: of all rows with one weight, or of groups of rows with a weight each.

Weights are restored in registers to the type of the rows, but for the factor of each output, which the sum is multiplied by.
Outputs are the first side of each product, because a warp group of sm_90 can multiply what it has in registers on that side
alone; so each weight is restored once for a tile of rows, and never written. Few rows are bound by reading weights, and one
weight has too few tiles of outputs to fill a device: several programs take a part of the inputs each then, and a second kernel
adds up what they found, always in the same order. The grid follows from shapes alone, so that launches can be captured.
"""

import torch
import triton
import triton.language as tl

from ..device_integers import DeviceIntegers
from .attention_tiles import COMPUTE_TYPES
from .grouped_linear import GROUPS_AT_ONCE, find_rows
from .sizes import cdiv
from .variants import MOST_SPLITS, group_rows, num_splits

_COLS = 128
_ROOM = {4: 80 << 10, 8: 110 << 10}  # bytes by warps, so that two or three programs share a multiprocessor
_MOST_STAGES = 6
_PARTS: tl.constexpr = tl.constexpr(MOST_SPLITS)


@triton.jit
def _half_at(word, SHIFT: tl.constexpr):
    """The half in the lower or upper 16 bits, as float32."""
    return (word >> SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _restore(words, scale, low, PLACE: tl.constexpr, BITS: tl.constexpr):
    """Weights [COLS, 16] of the integers at a place in words, from the scales and lows [COLS] of their group.

    An integer in the last bits of a half is a number of its size: so many times 2^-24.
    """
    AT: tl.constexpr = PLACE * BITS % 16
    HIGH: tl.constexpr = PLACE * BITS // 16 * 16
    MASK: tl.constexpr = (2**BITS - 1) * 2 ** (AT % 8 + HIGH)
    STEP: tl.constexpr = 2 ** (24 - AT % 8)
    if AT >= 8:
        words = words >> 8
    return _half_at(words & MASK, HIGH) * (scale * STEP)[:, None] + low[:, None]


@triton.jit(do_not_specialize=["num_rows", "num_groups", "slabs_each"])
def integer_linear_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    lows_ptr,
    factors_ptr,
    bias_ptr,
    starts_ptr,
    out_ptr,
    parts_ptr,
    num_rows,
    num_groups,
    slabs_each,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_SLABS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUPS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """COLS outputs of ROWS rows of one group, over slabs_each slabs of inputs. With several such parts: sums as they are."""
    BITS: tl.constexpr = 8 if lows_ptr is None else 4
    DEPTH: tl.constexpr = 512 // BITS
    program = tl.program_id(0)
    if starts_ptr is None:
        group, first, end = 0, program * ROWS, num_rows
    else:
        group, first, end = find_rows(starts_ptr, num_groups, program, ROWS, GROUPS)
    if first >= end:
        return
    rows = first + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inputs = tl.arange(0, 16)
    is_row, is_col = (rows < end)[None, :], cols < NUM_OUT
    begin = tl.program_id(2) * slabs_each
    at = (tl.cast(group, tl.int64) * NUM_SLABS + begin) * NUM_OUT
    words_ptrs = words_ptr + at * 16 + cols[:, None] * 16 + inputs[None, :]
    scales_ptrs = scales_ptr + at * (DEPTH // 64) + cols
    if lows_ptr is not None:
        lows_ptrs = lows_ptr + at * (DEPTH // 64) + cols
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * NUM_IN + inputs[:, None]
    acc = tl.zeros([COLS, ROWS], tl.float32)
    for slab in range(begin, min(begin + slabs_each, NUM_SLABS)):
        words = tl.load(words_ptrs, mask=is_col[:, None], other=0)
        words_ptrs += NUM_OUT * 16
        for pair in tl.static_range(DEPTH // 64):
            scales = tl.load(scales_ptrs, mask=is_col, other=0)
            scales_ptrs += NUM_OUT
            if lows_ptr is not None:
                lows = tl.load(lows_ptrs, mask=is_col, other=0)
                lows_ptrs += NUM_OUT
            for half in tl.static_range(2):
                scale = _half_at(scales, half * 16)
                if lows_ptr is None:
                    low = scale * -128.0
                else:
                    low = _half_at(lows, half * 16)
                for each in tl.static_range(2):
                    first_in = slab * DEPTH + (pair * 4 + half * 2 + each) * 16
                    wanted_x = is_row
                    if NUM_IN % DEPTH != 0:
                        wanted_x &= (first_in + inputs < NUM_IN)[:, None]
                    x_part = tl.load(x_ptrs + first_in, mask=wanted_x, other=0.0).to(COMPUTE)
                    weights = _restore(words, scale, low, pair * 4 + half * 2 + each, BITS).to(COMPUTE)
                    acc = tl.dot(weights, x_part, acc, input_precision="ieee")
    places = rows.to(tl.int64)[None, :] * NUM_OUT + cols[:, None]
    wanted = is_row & is_col[:, None]
    if tl.num_programs(2) > 1:
        part = tl.program_id(2).to(tl.int64) * num_rows * NUM_OUT
        tl.store(parts_ptr + part + places, acc, mask=wanted)
    else:
        acc *= tl.load(factors_ptr + group * NUM_OUT + cols, mask=is_col, other=0.0)[:, None]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + group * NUM_OUT + cols, mask=is_col, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def add_parts_kernel(parts_ptr, factors_ptr, bias_ptr, out_ptr, num_rows, num_parts, NUM_OUT: tl.constexpr, COLS: tl.constexpr):
    """COLS outputs of a row from the sums [num_parts, num_rows, NUM_OUT] of several programs, added in one order."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    parts = tl.arange(0, _PARTS)
    is_col = cols < NUM_OUT
    places = (parts.to(tl.int64) * num_rows + row)[:, None] * NUM_OUT + cols[None, :]
    acc = tl.sum(tl.load(parts_ptr + places, mask=(parts < num_parts)[:, None] & is_col[None, :], other=0.0), 0)
    acc *= tl.load(factors_ptr + cols, mask=is_col, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=is_col, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * NUM_OUT + cols, acc.to(out_ptr.dtype.element_ty), mask=is_col)


def integer_linear(
    x: torch.Tensor, weight: DeviceIntegers, bias: torch.Tensor | None, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """The CUDA path of products with an IntegerWeight: [N, O] for x [N, I], contiguous; starts: as of grouped_linear."""
    num_rows, num_in = x.shape
    num_slabs, num_out = weight.words.shape[-3:-1]
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    num_groups = 1 if starts is None else len(weight.words)
    rows, num_tiles = group_rows(num_rows, num_groups), cdiv(num_out, _COLS)
    if starts is None:
        num_row_tiles = cdiv(num_rows, rows)
        slabs_each = cdiv(num_slabs, num_splits(rows, num_row_tiles * num_tiles, num_slabs))
    else:
        num_row_tiles, slabs_each = num_rows // rows + num_groups, num_slabs
    num_parts, num_warps = cdiv(num_slabs, slabs_each), 8 if rows == 128 else 4
    stage_bytes = _COLS * (80 if weight.bits == 4 else 68) + 512 // weight.bits * rows * x.itemsize
    parts = torch.empty((num_parts if num_parts > 1 else 0, num_rows, num_out), device=x.device)
    lows = None if weight.lows is None else weight.lows.view(torch.int32)
    of_weight = weight.words, weight.scales.view(torch.int32), lows, weight.factors, bias
    integer_linear_kernel[num_row_tiles, num_tiles, num_parts](
        *(x, *of_weight, starts, out, parts, num_rows, num_groups, slabs_each),
        NUM_IN=num_in,
        NUM_OUT=num_out,
        NUM_SLABS=num_slabs,
        ROWS=rows,
        COLS=_COLS,
        GROUPS=GROUPS_AT_ONCE,
        COMPUTE=COMPUTE_TYPES[x.dtype],
        num_warps=num_warps,
        num_stages=min(_ROOM[num_warps] // stage_bytes, _MOST_STAGES),
    )
    if num_parts > 1:
        given = parts, weight.factors, bias, out, num_rows, num_parts
        add_parts_kernel[num_rows, num_tiles](*given, NUM_OUT=num_out, COLS=_COLS, num_warps=4)
    return out
