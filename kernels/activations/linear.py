"""linear: x W^T + b with a weight that is packed once for the device.

On a CPU, torch's float32 product goes to MKL, which on non-Intel machines runs at half the speed of oneDNN with a
prepacked weight (16 rows, measured: 90 against 160 to 220 GFLOP/s). The packed op is the one that torch's own
compiler uses when it freezes a model; it is not a public name, so where it is missing or refuses, the weight stays as
it is.

The compiled kernel multiplies what oneDNN has packed, and faster than oneDNN does (measured on two cores with AVX512: 1.5 to 2
times for a few rows, 1.05 for hundreds, in float32 and in bfloat16), but it has none of AMX's instructions: there oneDNN
multiplies more than a few rows of bfloat16. The kernel needs to know how the weight lies, which is looked at, not believed.
"""

import ctypes
import dataclasses
from functools import cache

import torch

from ..checks import on_cuda, require
from ..cpu import compiled
from ..cpu.products import RowBlocks, multiply
from ..types import LinearWeight
from .linear_float8 import Float8Weight, linear_float8
from .linear_integers import IntegerWeight, linear_integers

_OP = "linear"
_WIDTHS = (64, 32, 16)  # outputs of oneDNN's blocks
_DTYPES = (torch.float32, torch.bfloat16)
_FEW_ROWS = 4  # that a processor's units for tiles gain nothing with


def pack_linear(weight: LinearWeight) -> LinearWeight:
    """Pack a weight where its device has something to gain; the dense one may be dropped then."""
    data = weight.data
    if weight.packed or not data.is_cpu or data.dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return weight
    try:
        packed = LinearWeight(torch.ops.mkldnn._reorder_linear_weight(data, None), weight.bias, packed=True)
        linear(data.new_zeros(1, data.shape[1]), packed)  # refuses here if it refuses at all
    except (AttributeError, RuntimeError):
        return weight  # another torch: the plain product is right, if slower
    return dataclasses.replace(packed, blocks=_find_blocks(packed.data, data))


def _find_blocks(packed: torch.Tensor, data: torch.Tensor) -> RowBlocks | None:
    """Where a packed weight lies, and how: from its size, and from its first and last block in each of the known widths."""
    try:
        address, num_bytes = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    except (AttributeError, RuntimeError):
        return None  # another torch
    num_out, num_in = data.shape
    if num_in * data.itemsize % 4:
        return None  # a step takes four bytes of a row
    for width in _WIDTHS:
        num_blocks = -(-num_out // width)
        room, rest = divmod(num_bytes, num_blocks * width * data.itemsize)
        blocks = RowBlocks(address, width, room)
        if room >= num_in and not rest and all(_is_block(blocks, data, idx) for idx in {0, num_blocks - 1}):
            return blocks
    return None


def _is_block(blocks: RowBlocks, data: torch.Tensor, idx: int) -> bool:
    """Whether the outputs of a block are in its memory. They are compared as integers: not a number equals itself then."""
    as_bits, width = (torch.int32 if data.itemsize == 4 else torch.int16), blocks.width
    memory = (ctypes.c_char * (width * blocks.room * data.itemsize)).from_address(
        blocks.address + idx * width * blocks.room * data.itemsize
    )
    numbers = torch.frombuffer(memory, dtype=as_bits).view(-1, width, 4 // data.itemsize)
    found, expected = numbers.transpose(0, 1).flatten(1), data[idx * width : (idx + 1) * width].view(as_bits)
    return torch.equal(found[: len(expected), : data.shape[1]], expected)


def linear(x: torch.Tensor, weight: LinearWeight | IntegerWeight | Float8Weight) -> torch.Tensor:
    """Return x W^T + b, [..., out_features] for x [..., in_features]; with weights of few bits, as the ops of those do.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    if isinstance(weight, IntegerWeight):
        return linear_integers(x, weight)
    if isinstance(weight, Float8Weight):
        return linear_float8(x, weight)
    on_cuda(_OP, x)
    fits = x.shape[-1] == weight.data.shape[1] and x.dtype == weight.data.dtype
    require(fits, _OP, "x", "{} {} does not fit {}", x.dtype, x.shape, weight.data.shape)
    if weight.blocks is not None and compiled.serves(x) and x.is_contiguous() and not is_for_tiles(x):
        return multiply(x, weight.blocks, weight.bias, weight.data.shape[0])
    if weight.packed:
        return torch.ops.mkldnn._linear_pointwise(x, weight.data, weight.bias, "none", [], "")
    return torch.nn.functional.linear(x, weight.data, weight.bias)


def is_for_tiles(x: torch.Tensor) -> bool:
    """Whether oneDNN multiplies these rows with units that the compiled kernel does not use."""
    return x.dtype is torch.bfloat16 and x.numel() > _FEW_ROWS * x.shape[-1] and _has_tiles()


@cache
def _has_tiles() -> bool:
    asks = getattr(torch.cpu, "_is_amx_tile_supported", None)  # no public name, so another torch may lack it
    return asks is not None and bool(asks())
