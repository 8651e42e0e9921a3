"""linear: x W^T + b with a weight that is packed once for the device.

On a CPU, torch's float32 product goes to MKL, which on non-Intel machines runs at half the speed of oneDNN with a
prepacked weight (16 rows, measured: 90 against 160 to 220 GFLOP/s). The packed op is the one that torch's own
compiler uses when it freezes a model; it is not a public name, so where it is missing or refuses, the weight stays as
it is.

One row alone takes as long as reading the weight, and the compiled kernel reads the packed one faster than oneDNN does
(measured: in three quarters of the time). It needs to know how the weight lies there, which is looked at, not believed.
"""

import ctypes
import dataclasses

import torch

from ..checks import on_cuda, require
from ..cpu import compiled
from ..cpu.rows import multiply_row
from ..types import LinearWeight, RowBlocks
from .linear_int8 import Int8Weight, linear_int8

_OP = "linear"
_WIDTHS, _INPUTS = (64, 48, 32, 16), 16  # of oneDNN's blocks: outputs, and the multiple that inputs are filled up to


def pack_linear(weight: LinearWeight) -> LinearWeight:
    """Pack a weight where its device has something to gain; the dense one may be dropped then."""
    data = weight.data
    if weight.packed or not data.is_cpu or data.dtype is not torch.float32 or not torch.backends.mkldnn.is_available():
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
    for width in _WIDTHS:
        blocks = RowBlocks(address, width, -(-num_in // _INPUTS) * _INPUTS)
        block_bytes, last = width * blocks.room * data.itemsize, (num_out - 1) // width
        if num_bytes == (last + 1) * block_bytes and all(_is_block(blocks, block_bytes, data, idx) for idx in {0, last}):
            return blocks
    return None


def _is_block(blocks: RowBlocks, block_bytes: int, data: torch.Tensor, idx: int) -> bool:
    """Whether the outputs of a block are in its memory. They are compared as integers: not a number equals itself then."""
    memory = (ctypes.c_char * block_bytes).from_address(blocks.address + idx * block_bytes)
    found = torch.frombuffer(memory, dtype=torch.int32).view(-1, blocks.width).T
    expected = data[idx * blocks.width : (idx + 1) * blocks.width].view(torch.int32)
    return torch.equal(found[: len(expected), : data.shape[1]], expected)


def linear(x: torch.Tensor, weight: LinearWeight | Int8Weight) -> torch.Tensor:
    """Return x W^T + b, [..., out_features] for x [..., in_features]; with an Int8Weight, as linear_int8 does.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    if isinstance(weight, Int8Weight):
        return linear_int8(x, weight)
    on_cuda(_OP, x)
    fits = x.shape[-1] == weight.data.shape[1] and x.dtype == weight.data.dtype
    require(fits, _OP, "x", "{} {} does not fit {}", x.dtype, x.shape, weight.data.shape)
    if weight.blocks is not None and x.numel() == x.shape[-1] and compiled.serves(x) and x.is_contiguous():
        return multiply_row(x, weight.blocks, weight.bias, weight.data.shape[0])
    if weight.packed:
        return torch.ops.mkldnn._linear_pointwise(x, weight.data, weight.bias, "none", [], "")
    return torch.nn.functional.linear(x, weight.data, weight.bias)
