"""quantised_decode on CUDA: as paged_attention_decode, over stored K and V and the pages of the tail, in one launch.

Sequences are cut into the same items and merged by the same kernel, and what many of them share is read once for sixteen.
"""

import torch
import triton
import triton.language as tl

from ..quantised.layout import QuantisedLayer
from ..types import QuantisedRows
from .attention_tiles import NO_WINDOW, Options, begin_rows
from .decode_work import DecodeWork, plan_work, visible_tiles
from .paged_attention_decode import merge_items
from .quantised_shared import read_shared
from .shared_prefix import MEMBERS
from .sizes import power_of_2
from .stored_tiles import find_tokens, get_pointers, make_constants, stored_tile_tokens, take_stored


@triton.jit(do_not_specialize=["table_stride", "window"])
def quantised_decode_kernel(
    q_ptr,
    elements_ptr,
    scales_ptr,
    tail_ptr,
    table_ptr,
    tail_table_ptr,
    len_ptr,
    logit_ptr,
    items_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    q_stride,
    table_stride,
    block_stride,
    side_stride,
    scale_stride,
    scale_side_stride,
    tail_stride,
    tail_side_stride,
    scale,
    cap,
    window,
    HAS_CAP: tl.constexpr,
    PACKED: tl.constexpr,
    FLOAT: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    T: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One KV head, one item of the work list, or one sequence; part and lse are decode_kernel's."""
    HALF: tl.constexpr = HEAD_DIM // 2
    kv_head, item = tl.program_id(0), tl.program_id(1)
    seq = item
    if items_ptr is not None:
        seq = tl.load(items_ptr + item * 4)
        if seq < 0:
            return
    seq_len = tl.load(len_ptr + seq)
    first, _num_sinks, num_tiles = visible_tiles(seq_len, seq_len * 0, seq_len * 0, window, T)
    begin, end, is_part = num_tiles * 0, num_tiles, num_tiles < 0
    if items_ptr is not None:
        begin, end = tl.load(items_ptr + item * 4 + 1), tl.load(items_ptr + item * 4 + 2)
        is_part = tl.load(items_ptr + item * 4 + 3) > 0
    rows, dims = tl.arange(0, M), tl.arange(0, DH)
    heads = kv_head * GROUP + rows
    table_ptr += seq.to(tl.int64) * table_stride
    if tail_table_ptr is not None:
        tail_table_ptr += seq.to(tl.int64) * table_stride
    wanted = (rows < GROUP)[:, None] & (dims < HALF)[None, :]
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    q_ptrs = q_ptr + seq.to(tl.int64) * q_stride + offsets
    q_low = tl.load(q_ptrs, mask=wanted, other=0.0).to(COMPUTE)
    q_high = tl.load(q_ptrs + HALF, mask=wanted, other=0.0).to(COMPUTE)
    low, high = tl.zeros([M, DH], tl.float32), tl.zeros([M, DH], tl.float32)
    most, total = begin_rows(logit_ptr, heads, rows < GROUP, begin == 0, M)
    for tile in range(begin + first // T, end + first // T):
        _tokens, live, blocks, pages, slots = find_tokens(table_ptr, tail_table_ptr, tile, first, seq_len, T, BLOCK_SIZE)
        low, high, most, total = take_stored(
            low, high, most, total, q_low, q_high, live[None, :],
            elements_ptr, scales_ptr, tail_ptr, blocks, pages, slots, live, kv_head,
            block_stride, side_stride, scale_stride, scale_side_stride, tail_stride, tail_side_stride,
            scale, cap, HAS_CAP, PACKED, FLOAT, MOST, KV_HEADS, HEAD_DIM, DH, COMPUTE,
        )  # fmt: skip
    divisor = (tl.where(total > 0, total, 1.0) * MOST)[:, None]
    low, high = low / divisor, high / divisor
    num_heads = tl.num_programs(0) * GROUP
    if lse_ptr is not None:  # noqa: SIM102  # known when the kernel is compiled; the next one is not
        if is_part:
            part_rows = item.to(tl.int64) * num_heads + heads
            part_ptrs = part_ptr + part_rows[:, None] * HEAD_DIM + dims[None, :]
            tl.store(part_ptrs, low, mask=wanted)
            tl.store(part_ptrs + HALF, high, mask=wanted)
            lse = tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
            tl.store(lse_ptr + part_rows, lse, mask=rows < GROUP)
            return
    out_ptrs = out_ptr + seq.to(tl.int64) * num_heads * HEAD_DIM + offsets
    tl.store(out_ptrs, low.to(out_ptr.dtype.element_ty), mask=wanted)
    tl.store(out_ptrs + HALF, high.to(out_ptr.dtype.element_ty), mask=wanted)


def quantised_decode(
    q: torch.Tensor,
    layer: QuantisedLayer,
    rows: QuantisedRows,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """The CUDA path of kernels.quantised.attention.quantised_decode, with its arguments."""
    num_seqs, num_heads, head_dim = q.shape
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    layout, stored, constants = layer.layout, get_pointers(layer), make_constants(layer, q, soft_cap)
    work = _work(rows, layer, window)
    part, lse, num_own, shared = None, None, 0, None
    if work is not None:
        num_own, shared = work.items.shape[0], work.shared
        num_parts = (num_own + (0 if shared is None else shared.items.shape[0] * MEMBERS)) * num_heads
        # Given back behind each layer, as `out` is, and by a capture to the memory of graphs: nothing in it outlives the merge.
        memory = torch.empty(num_parts * (head_dim + 1), dtype=torch.float32, device=q.device)
        part, lse = memory.split([num_parts * head_dim, num_parts])
    factors = Options(scale, window, soft_cap, None, None).factors
    quantised_decode_kernel[layout.num_kv_heads, num_seqs if work is None else num_own](
        q,
        stored.elements,
        stored.scales,
        stored.tail,
        rows.block_tables,
        rows.tail_tables,
        rows.seq_lens,
        sink_logits,
        None if work is None else work.items,
        out,
        part,
        lse,
        q.stride(0),
        rows.block_tables.stride(0),
        *stored.strides,
        *factors,
        window or NO_WINDOW,
        **constants,
        M=max(power_of_2(constants["GROUP"]), 16),
        num_warps=4 if constants["DH"] > 32 else 8,  # with four, small heads spill
        num_stages=3,
    )
    if shared is not None:
        assert part is not None and lse is not None, "there is a work list"
        read_shared(q, stored, constants, rows.block_tables, sink_logits, shared, part, lse, num_own, factors)
    if work is not None:
        merge_items(part, lse, work.runs, out, num_own=num_own, shared=shared)
    return out


def _work(rows: QuantisedRows, layer: QuantisedLayer, window: int | None) -> DecodeWork | None:
    """The work list for the rows; made once for all layers of a group and a window."""
    if window not in rows.works:
        layout = layer.layout
        shape = torch.empty((1, 2, layout.block_size, layout.num_kv_heads, layout.head_dim), device="meta")
        tile, tails = stored_tile_tokens(layout.head_dim), rows.tail_tables
        rows.works[window] = plan_work(
            rows.block_tables, rows.seq_lens, shape, window, None, tile, may_share=True, tail_tables=tails
        )
    return rows.works[window]
