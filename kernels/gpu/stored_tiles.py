"""Common to the kernels that read K and V in few bits: tiles of tokens from stored blocks or from pages of the tail.

A head is taken as two halves, because a byte of the 4-bit format has an element of each. Elements stay integers until they are
multiplied: the scale of K goes into the scores, and that of V into the weights, so that a dot costs what it costs without
scales. Products are added up in float32, for 8-bit floats as well.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..quantised.formats import FP8, INT8
from ..quantised.layout import QuantisedLayer
from .attention_tiles import COMPUTE_TYPES
from .sizes import power_of_2


@dataclass(frozen=True, slots=True)
class StoredPointers:
    """What a launch is given of a layer: elements, scales, pages of the tail or None, and strides in their elements."""

    elements: torch.Tensor
    scales: torch.Tensor
    tail: torch.Tensor | None
    strides: tuple[int, int, int, int, int, int]  # of a block and from K to V: of elements, of scales, of the tail


def stored_tile_tokens(head_dim: int) -> int:
    """Tokens of a tile."""
    return 64 if power_of_2(head_dim) <= 128 else 32


def get_pointers(layer: QuantisedLayer) -> StoredPointers:
    """The pointers of a layer; elements as integers, those of 8-bit floats as their bits, scales as bfloat16."""
    elements, scales, tail = layer.elements, layer.scales, layer.tail
    strides = (elements.stride(0), elements.stride(1), scales.stride(0), scales.stride(1))
    of_tail = (0, 0) if tail is None else (tail.stride(0), tail.stride(1))
    if layer.layout.kv_format is INT8:
        elements = elements.view(torch.int8)
    return StoredPointers(elements, scales.view(torch.bfloat16), tail, (*strides, *of_tail))


def make_constants(layer: QuantisedLayer, q: torch.Tensor, soft_cap: float | None) -> dict[str, Any]:
    """What both kernels are compiled for, of a layer and queries [..., heads, head_dim]."""
    layout, (num_heads, head_dim) = layer.layout, q.shape[1:]
    half = max(power_of_2(head_dim // 2), 16)
    return {
        "HAS_CAP": soft_cap is not None,
        "PACKED": layout.kv_format.dtype is None,
        "FLOAT": layout.kv_format is FP8,
        "MOST": float(layout.kv_format.most or 1),
        "GROUP": num_heads // layout.num_kv_heads,
        "KV_HEADS": layout.num_kv_heads,
        "HEAD_DIM": head_dim,
        "DH": half,
        "T": stored_tile_tokens(head_dim),
        "BLOCK_SIZE": layout.block_size,
        "COMPUTE": COMPUTE_TYPES[q.dtype],
    }


@triton.jit
def find_tokens(table_ptr, tail_table_ptr, tile, first, end, T: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Positions [T] of a tile, their blocks and pages, 0 for none, and slots within these. Outside [first, end): block 0."""
    tokens = tile * T + tl.arange(0, T)
    live = (tokens >= first) & (tokens < end)
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    pages = blocks * 0
    if tail_table_ptr is not None:
        pages = tl.load(tail_table_ptr + tokens // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    return tokens, live, blocks, pages, tokens % BLOCK_SIZE


@triton.jit
def load_side(
    elements_ptr,
    scales_ptr,
    tail_ptr,
    blocks,
    pages,
    slots,
    live,
    kv_head,
    block_stride,
    scale_stride,
    tail_stride,
    PACKED: tl.constexpr,
    FLOAT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DH: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """K or V of a tile as two halves [T, DH] of its elements, and scales [T], 1 for tokens that have a page."""
    HALF: tl.constexpr = HEAD_DIM // 2
    ROW: tl.constexpr = HALF if PACKED else HEAD_DIM
    dims = tl.arange(0, DH)
    entries = slots * KV_HEADS + kv_head
    is_stored = live & (pages == 0)
    wanted = is_stored[:, None] & (dims < HALF)[None, :]
    ptrs = elements_ptr + (blocks * block_stride + entries * ROW)[:, None] + dims[None, :]
    if PACKED:
        both = tl.load(ptrs, mask=wanted, other=0x88).to(tl.int32)
        low, high = ((both & 15) - 8).to(COMPUTE), ((both >> 4) - 8).to(COMPUTE)
    else:
        low = tl.load(ptrs, mask=wanted, other=0)
        high = tl.load(ptrs + HALF, mask=wanted, other=0)
        if FLOAT:  # e4m3 fits float16 exactly
            low = low.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            high = high.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        low, high = low.to(COMPUTE), high.to(COMPUTE)
    scales = tl.load(scales_ptr + blocks * scale_stride + entries, mask=is_stored, other=1.0).to(tl.float32)
    if tail_ptr is not None:
        has_page = live & (pages > 0)
        wanted = has_page[:, None] & (dims < HALF)[None, :]
        ptrs = tail_ptr + (pages * tail_stride + entries * HEAD_DIM)[:, None] + dims[None, :]
        low = tl.where(has_page[:, None], tl.load(ptrs, mask=wanted, other=0.0).to(COMPUTE), low)
        high = tl.where(has_page[:, None], tl.load(ptrs + HALF, mask=wanted, other=0.0).to(COMPUTE), high)
    return low, high, scales


@triton.jit
def half_scores(q_low, q_high, k_low, k_high, scales, scale, cap, HAS_CAP: tl.constexpr):
    """Scores [M, T] in base 2 of queries [M, DH] twice and keys [T, DH] twice, whose scales are [T]."""
    scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
    scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee") * (scales * scale)[None, :]
    if HAS_CAP:  # see attention_tiles.tile_scores
        scores = (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0)) * cap
    return scores


@triton.jit
def take_halves(low, high, most, total, scores, v_low, v_high, scales, COMPUTE: tl.constexpr, MOST: tl.constexpr):
    """Take scores [M, T], -inf for hidden keys, and values into the running softmax; accumulators are MOST times too large.

    So what a scale is multiplied into is as large as a value, and not as small as a step of one, which 16 bits could not hold.
    """
    new_most = tl.maximum(most, tl.max(scores, 1))
    weights = tl.exp2(scores - new_most[:, None])
    decay = tl.exp2(most - new_most)
    total = total * decay + tl.sum(weights, 1)
    scaled = (weights * (scales * MOST)[None, :]).to(COMPUTE)
    low = tl.dot(scaled, v_low, low * decay[:, None], input_precision="ieee")
    high = tl.dot(scaled, v_high, high * decay[:, None], input_precision="ieee")
    return low, high, new_most, total


@triton.jit
def take_stored(
    low,
    high,
    most,
    total,
    q_low,
    q_high,
    seen,
    elements_ptr,
    scales_ptr,
    tail_ptr,
    blocks,
    pages,
    slots,
    live,
    kv_head,
    block_stride,
    side_stride,
    scale_stride,
    scale_side_stride,
    tail_stride,
    tail_side_stride,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    PACKED: tl.constexpr,
    FLOAT: tl.constexpr,
    MOST: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DH: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Take the tokens of find_tokens into the running softmax of queries [M, DH] twice, where seen [M or 1, T] says so."""
    tail_values = tail_ptr
    if tail_ptr is not None:
        tail_values += tail_side_stride
    k_low, k_high, k_scales = load_side(
        elements_ptr, scales_ptr, tail_ptr, blocks, pages, slots, live, kv_head, block_stride, scale_stride, tail_stride,
        PACKED, FLOAT, KV_HEADS, HEAD_DIM, DH, COMPUTE,
    )  # fmt: skip
    v_low, v_high, v_scales = load_side(
        elements_ptr + side_stride, scales_ptr + scale_side_stride, tail_values, blocks, pages, slots, live, kv_head,
        block_stride, scale_stride, tail_stride, PACKED, FLOAT, KV_HEADS, HEAD_DIM, DH, COMPUTE,
    )  # fmt: skip
    scores = half_scores(q_low, q_high, k_low, k_high, k_scales, scale, cap, HAS_CAP)
    scores = tl.where(seen, scores, float("-inf"))
    return take_halves(low, high, most, total, scores, v_low, v_high, v_scales, COMPUTE, MOST)
