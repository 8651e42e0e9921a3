"""short_conv on CUDA: some channels of a row a program, whose tokens it takes a chunk at a time.

A program alone reads and writes its channels of the row's pages. It reads the page first, and writes pages from the last chunk
to the first one, because that alone may have the page that is read.
"""

import torch
import triton
import triton.language as tl

from ..types import STATE_CHUNK, ConvInputs, StateChunks, StateRows
from .sizes import cdiv, power_of_2

_CHANNELS = 64  # of a program


@triton.jit
def load_inputs(mixed_ptr, page_ptr, tokens, row_first, has_page, live, CHANNELS: tl.constexpr, KERNEL: tl.constexpr):
    """What goes into the convolution: of tokens of the step, or from the page for those before the row's first one.

    The pointers are at the channels [1, COLS], tokens and live [N, 1] and [N, COLS].
    """
    is_own = live & (tokens >= row_first)
    at = mixed_ptr + tokens * 3 * CHANNELS
    first, third = tl.load(at, mask=is_own, other=0.0), tl.load(at + 2 * CHANNELS, mask=is_own, other=0.0)
    made = (first.to(tl.float32) * third.to(tl.float32)).to(first.dtype)
    is_held = live & (tokens < row_first) & has_page
    return made + tl.load(page_ptr + (KERNEL - 1 + tokens - row_first) * CHANNELS, mask=is_held, other=0.0)


@triton.jit
def short_conv_kernel(
    mixed_ptr,
    start_ptr,
    first_ptr,
    len_ptr,
    read_ptr,
    write_ptr,
    weight_ptr,
    bias_ptr,
    window_ptr,
    out_ptr,
    page_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
):
    """COLS channels of one row. Without starts each row is one token: that of first_ptr, or that of the row's number."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_channel = channels < CHANNELS
    begin = row if start_ptr is None else tl.load(start_ptr + row)
    end = row + 1 if start_ptr is None else tl.load(start_ptr + row + 1)
    row_first = row if first_ptr is None else tl.load(first_ptr + begin)
    read = tl.load(read_ptr + row)
    mixed_ptrs = mixed_ptr + channels[None, :]
    page_ptrs = window_ptr + read * page_stride + channels[None, :]
    steps = tl.arange(0, TOKENS)[:, None]
    for chunk in range(begin, end):
        first = row if first_ptr is None else tl.load(first_ptr + chunk)
        count = 1 if len_ptr is None else tl.load(len_ptr + chunk)
        live, tokens = (steps < count) & is_channel[None, :], first + steps
        total = tl.zeros((TOKENS, COLS), tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(KERNEL):
            at = tokens - (KERNEL - 1 - tap)
            x = load_inputs(mixed_ptrs, page_ptrs, at, row_first, read > 0, live, CHANNELS, KERNEL)
            weight = tl.load(weight_ptr + channels * KERNEL + tap, mask=is_channel, other=0.0)
            total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
        second = tl.load(mixed_ptrs + (tokens * 3 + 1) * CHANNELS, mask=live, other=0.0)
        out = second.to(tl.float32) * total.to(second.dtype).to(tl.float32)
        tl.store(out_ptr + tokens * CHANNELS + channels[None, :], out.to(second.dtype), mask=live)
    slots = tl.arange(0, SLOTS)[:, None]
    for number in range(begin, end):
        chunk = end - 1 - (number - begin)
        write = tl.load(write_ptr + chunk)
        first = row if first_ptr is None else tl.load(first_ptr + chunk)
        count = 1 if len_ptr is None else tl.load(len_ptr + chunk)
        live = (slots < KERNEL - 1) & is_channel[None, :] & (write > 0)
        at = first + count - (KERNEL - 1) + slots
        x = load_inputs(mixed_ptrs, page_ptrs, at, row_first, read > 0, live, CHANNELS, KERNEL)
        tl.debug_barrier()  # other threads have read what this one writes to
        tl.store(window_ptr + write * page_stride + slots * CHANNELS + channels[None, :], x, mask=live)


def short_conv(inputs: ConvInputs, window: torch.Tensor, rows: StateRows | StateChunks, out: torch.Tensor) -> None:
    """The CUDA path of kernels.recurrent.short_conv, with its arguments."""
    channels, kernel = inputs.conv.shape
    columns: tuple[torch.Tensor | None, ...]
    if isinstance(rows, StateRows):
        columns, tokens = (None, rows.tokens, None), 1
    else:
        columns, tokens = (rows.starts, rows.firsts, rows.lens), STATE_CHUNK
    short_conv_kernel[(len(rows.reads), cdiv(channels, _CHANNELS))](
        inputs.mixed,
        *columns,
        rows.reads,
        rows.writes,
        inputs.conv,
        inputs.bias,
        window,
        out,
        window.stride(0),
        CHANNELS=channels,
        KERNEL=kernel,
        SLOTS=power_of_2(kernel - 1),
        TOKENS=tokens,
        COLS=_CHANNELS,
        num_warps=2 if tokens == 1 else 4,
    )
