"""short_conv: a gated causal convolution over a few tokens of each channel, on states in pages, as LFM2 has it.

What goes into the convolution is the product of two projected numbers, and its last ones are the state; what comes out is
multiplied by a third. A row may be cut anywhere, and the result does not depend on where. Products are rounded as they are in
transformers: to the dtype of the inputs, one by one, with sums in float32.
"""

from itertools import pairwise

import torch

from ..checks import on_cuda, require
from ..cpu import compiled
from ..cpu.short_conv import short_conv as compiled_conv
from ..types import ConvInputs, StateChunks, StateRows
from .pages import read_pages, require_pages, write_pages

_OP = "short_conv"


def short_conv(inputs: ConvInputs, window: torch.Tensor, rows: StateRows | StateChunks, out: torch.Tensor) -> None:
    """Compute rows of one token or of several, and their states in place.

    Args:
        inputs: of the step's T tokens.
        window: [P, kernel - 1, C], pages a stride apart: of each what went into the convolution last.
        rows: which tokens, and which pages.
        out: [T, C], contiguous, where the tokens' outputs go.

    Raises:
        KernelArgumentError: shapes, strides or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, inputs.mixed)
    _check(inputs, window, out)
    require_pages(_OP, rows)
    if cuda:
        from ..gpu.short_conv import short_conv as on_device

        on_device(inputs, window, rows, out)
    elif compiled.serves(out):
        compiled_conv(inputs, window, rows, out)
    elif isinstance(rows, StateRows):
        _convolve_rows(inputs, window, rows, out)
    else:
        _convolve_chunks(inputs, window, rows, out)


def _check(inputs: ConvInputs, window: torch.Tensor, out: torch.Tensor) -> None:
    mixed, conv, bias = inputs
    channels, kernel = conv.shape
    require(conv.is_contiguous() and conv.dtype is mixed.dtype, _OP, "conv", "must be contiguous {}", mixed.dtype)
    fits = bias is None or (bias.shape == (channels,) and bias.is_contiguous() and bias.dtype is mixed.dtype)
    require(fits, _OP, "bias", "must be {} [{}]", mixed.dtype, channels)
    fits = mixed.shape == (len(mixed), 3 * channels) and mixed.is_contiguous()
    require(fits, _OP, "mixed", "must be contiguous rows of {}, is {}", 3 * channels, mixed.shape)
    fits = window.shape[1:] == (kernel - 1, channels) and window[0].is_contiguous() and window.dtype is mixed.dtype
    require(fits, _OP, "window", "must be {} [P, {}, {}], is {}", mixed.dtype, kernel - 1, channels, window.shape)
    fits = out.shape == (len(mixed), channels) and out.is_contiguous() and out.dtype is mixed.dtype
    require(fits, _OP, "out", "must be {} [{}, {}], is {}", mixed.dtype, len(mixed), channels, out.shape)


def _convolve_rows(inputs: ConvInputs, window: torch.Tensor, rows: StateRows, out: torch.Tensor) -> None:
    tokens = slice(None) if rows.tokens is None else rows.tokens
    first, second, third = inputs.mixed[tokens].chunk(3, 1)
    held = torch.cat((read_pages(window, rows.reads), (first * third)[:, None]), 1)
    out[tokens] = second * _sum_up(held.float().transpose(0, 1), inputs).to(out.dtype)
    write_pages(window, rows.writes, held[:, 1:])


def _convolve_chunks(inputs: ConvInputs, window: torch.Tensor, chunks: StateChunks, out: torch.Tensor) -> None:
    starts, firsts, lens = (column.tolist() for column in (chunks.starts, chunks.firsts, chunks.lens))
    for row, (first_chunk, end_chunk) in enumerate(pairwise(starts)):
        held = read_pages(window, chunks.reads[row : row + 1])[0]
        for chunk in range(first_chunk, end_chunk):
            tokens, count = slice(firsts[chunk], firsts[chunk] + lens[chunk]), lens[chunk]
            first, second, third = inputs.mixed[tokens].chunk(3, 1)
            held = torch.cat((held, first * third))
            taken = held.float().unfold(0, count, 1).permute(0, 2, 1)  # [kernel, T, C]
            out[tokens] = second * _sum_up(taken, inputs).to(out.dtype)
            held = held[count:]
            write_pages(window, chunks.writes[chunk : chunk + 1], held[None])


def _sum_up(taken: torch.Tensor, inputs: ConvInputs) -> torch.Tensor:
    """Float32 [T, C] for the inputs [kernel, T, C]."""
    made = torch.einsum("ktc,ck->tc", taken, inputs.conv.float())
    return made if inputs.bias is None else made + inputs.bias.float()
