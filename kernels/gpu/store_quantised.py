"""store_quantised on CUDA: each head is read once, and written in few bits and, where its token has a page, as it is.

Follows quantised/formats.py bit by bit: integers are made by adding and taking off 1.5 * 2^23, which rounds ties to even, and
8-bit floats by integer arithmetic, which is the same in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from ..quantised.formats import FP8
from ..quantised.layout import QuantisedLayer
from ..types import QuantisedSlots
from .float8 import e4m3_bits
from .sizes import power_of_2, warps_for

_ROUND: tl.constexpr = tl.constexpr(12582912.0)
_LEAST: tl.constexpr = tl.constexpr(1e-30)


@triton.jit
def _whole(x):
    return (x + _ROUND) - _ROUND


@triton.jit
def store_quantised_kernel(
    k_ptr,
    v_ptr,
    elements_ptr,
    scales_ptr,
    tail_ptr,
    slot_ptr,
    tail_slot_ptr,
    k_stride,
    v_stride,
    block_stride,
    side_stride,
    scale_stride,
    scale_side_stride,
    tail_stride,
    tail_side_stride,
    PACKED: tl.constexpr,
    FLOAT: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """All heads of K, or of V, of one token; scales as int16."""
    HALF: tl.constexpr = HEAD_DIM // 2
    ROW: tl.constexpr = HALF if PACKED else HEAD_DIM
    token, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_ptr + token)
    heads, dims = tl.arange(0, HEADS), tl.arange(0, DH)
    live = (heads < KV_HEADS)[:, None] & (dims < HALF)[None, :]
    dense = heads[:, None] * HEAD_DIM + dims[None, :]
    if side == 0:
        low = tl.load(k_ptr + token * k_stride + dense, mask=live, other=0.0)
        high = tl.load(k_ptr + token * k_stride + dense + HALF, mask=live, other=0.0)
    else:
        low = tl.load(v_ptr + token * v_stride + dense, mask=live, other=0.0)
        high = tl.load(v_ptr + token * v_stride + dense + HALF, mask=live, other=0.0)
    if tail_ptr is not None:
        tail_slot = tl.load(tail_slot_ptr + token)
        page_ptrs = tail_ptr + tail_slot // BLOCK_SIZE * tail_stride + side * tail_side_stride
        page_ptrs += tail_slot % BLOCK_SIZE * (KV_HEADS * HEAD_DIM) + dense
        tl.store(page_ptrs, low, mask=live & (tail_slot >= 0))
        tl.store(page_ptrs + HALF, high, mask=live & (tail_slot >= 0))
    if slot < 0:
        return
    a, b = low.to(tl.float32), high.to(tl.float32)
    has_a, has_b = tl.abs(a) < float("inf"), tl.abs(b) < float("inf")  # neither is so for what is not a number
    is_finite = (tl.min(has_a.to(tl.int32), 1) + tl.min(has_b.to(tl.int32), 1)) == 2
    a, b = tl.where(has_a, a, 0.0), tl.where(has_b, b, 0.0)
    if PACKED:
        top, bottom = tl.max(tl.maximum(a, b), 1), -tl.min(tl.minimum(a, b), 1)
        greatest = tl.maximum(top, bottom)
    else:
        greatest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
    raw = tl.math.div_rn(greatest, greatest * 0.0 - LEAST)
    bits = (raw.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    bits = tl.where(raw < _LEAST, 0, bits)
    value = (bits << 16).to(tl.float32, bitcast=True)
    factor = tl.where(value > 0, tl.math.div_rn(value * 0.0 + 1.0, tl.where(value > 0, value, 1.0)), 0.0)[:, None]
    if PACKED:  # the number of the greatest magnitude is stored as the least element
        is_negative = (top > bottom) & (bits != 0)
        bits = tl.where(is_negative, bits | 0x8000, bits)
        factor = tl.where(is_negative[:, None], -factor, factor)
    a, b = a * factor, b * factor
    entries = slot % BLOCK_SIZE * KV_HEADS + heads
    ptrs = elements_ptr + slot // BLOCK_SIZE * block_stride + side * side_stride + entries[:, None] * ROW + dims[None, :]
    if PACKED:
        a, b = tl.minimum(_whole(a), MOST), tl.minimum(_whole(b), MOST)
        packed = (a.to(tl.int32) + 8) | ((b.to(tl.int32) + 8) << 4)
        tl.store(ptrs, packed.to(tl.uint8), mask=live)
    elif FLOAT:
        a, b = tl.minimum(tl.maximum(a, -MOST), MOST), tl.minimum(tl.maximum(b, -MOST), MOST)
        tl.store(ptrs, e4m3_bits(a).to(tl.uint8), mask=live)
        tl.store(ptrs + HALF, e4m3_bits(b).to(tl.uint8), mask=live)
    else:
        tl.store(ptrs, (_whole(a).to(tl.int32) & 0xFF).to(tl.uint8), mask=live)
        tl.store(ptrs + HALF, (_whole(b).to(tl.int32) & 0xFF).to(tl.uint8), mask=live)
    scale_ptrs = scales_ptr + slot // BLOCK_SIZE * scale_stride + side * scale_side_stride + entries
    tl.store(scale_ptrs, tl.where(is_finite, bits, 0x7FC0).to(tl.int16), mask=heads < KV_HEADS)


def store_quantised(k: torch.Tensor, v: torch.Tensor, layer: QuantisedLayer, slots: QuantisedSlots) -> None:
    """The CUDA path of kernels.quantised.store.store_quantised, with its arguments."""
    num_tokens = slots.stored.shape[0]
    if num_tokens == 0:
        return
    layout, tail = layer.layout, layer.tail
    half, heads = power_of_2(layout.head_dim // 2), power_of_2(layout.num_kv_heads)
    store_quantised_kernel[num_tokens, 2](
        k,
        v,
        layer.elements,
        layer.scales,
        tail,
        slots.stored,
        slots.tail,
        k.stride(0),
        v.stride(0),
        layer.elements.stride(0),
        layer.elements.stride(1),
        layer.scales.stride(0),
        layer.scales.stride(1),
        0 if tail is None else tail.stride(0),
        0 if tail is None else tail.stride(1),
        PACKED=layout.kv_format.dtype is None,
        FLOAT=layout.kv_format is FP8,
        LEAST=float(layout.kv_format.least),
        MOST=float(layout.kv_format.most),
        KV_HEADS=layout.num_kv_heads,
        HEADS=heads,
        HEAD_DIM=layout.head_dim,
        DH=half,
        BLOCK_SIZE=layout.block_size,
        num_warps=warps_for(heads * half),
        enable_fp_fusion=False,  # a product that is not rounded before 1.5 * 2^23 is added to it ties otherwise
    )
