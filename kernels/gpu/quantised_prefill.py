"""quantised_prefill on CUDA: as paged_attention_prefill, over stored K and V and the pages of the tail, in one launch.

Few queries on a long cached prefix are split by their keys as there, and merged by the same kernel.
"""

import torch
import triton
import triton.language as tl

from ..quantised.layout import QuantisedLayer
from ..types import QuantisedRows
from .attention_tiles import NO_WINDOW, Options, begin_rows
from .paged_attention_decode import merge_items
from .paged_attention_prefill import busy_programs, find_sequence, plan_splits
from .sizes import cdiv, power_of_2
from .stored_tiles import find_tokens, get_pointers, make_constants, take_stored

_SEQS_AT_ONCE = 256


@triton.jit(do_not_specialize=["table_stride", "window", "num_seqs", "num_splits"])
def quantised_prefill_kernel(
    q_ptr,
    elements_ptr,
    scales_ptr,
    tail_ptr,
    table_ptr,
    tail_table_ptr,
    len_ptr,
    logit_ptr,
    loc_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    num_seqs,
    num_splits,
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
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    T: tl.constexpr,
    SEQS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """M // GROUP tokens of one sequence, the heads of one KV head. The last tokens see most keys, so they begin first.

    Writes to `part` and `lse` where they are given, one split of the tiles, else to `out`; they are prefill_kernel's.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    TOKENS: tl.constexpr = M // GROUP
    program, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    seq = find_sequence(loc_ptr, num_seqs, program, TOKENS, SEQS)
    loc = tl.load(loc_ptr + seq)
    query_len = tl.load(loc_ptr + seq + 1) - loc
    first_token = (program - loc // TOKENS - seq) * TOKENS
    if first_token >= query_len:
        return
    context_len = tl.load(len_ptr + seq) - query_len
    rows, dims = tl.arange(0, M), tl.arange(0, DH)
    row_tokens = first_token + rows // GROUP
    positions = context_len + row_tokens
    low_position, high_position = context_len + first_token, context_len + tl.minimum(first_token + TOKENS, query_len) - 1
    heads = kv_head * GROUP + rows % GROUP
    wanted = ((row_tokens < query_len) & (rows < TOKENS * GROUP))[:, None] & (dims < HALF)[None, :]
    q_rows = (loc + row_tokens).to(tl.int64)
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    table_ptr += seq.to(tl.int64) * table_stride
    if tail_table_ptr is not None:
        tail_table_ptr += seq.to(tl.int64) * table_stride
    q_ptrs = q_ptr + q_rows[:, None] * q_stride + offsets
    q_low = tl.load(q_ptrs, mask=wanted, other=0.0).to(COMPUTE)
    q_high = tl.load(q_ptrs + HALF, mask=wanted, other=0.0).to(COMPUTE)
    low, high = tl.zeros([M, DH], tl.float32), tl.zeros([M, DH], tl.float32)
    split = tl.program_id(2)
    most, total = begin_rows(logit_ptr, heads, rows < TOKENS * GROUP, split == 0, M)
    first, end = tl.maximum(low_position - window + 1, 0), high_position + 1
    begin_tile, end_tile = first // T, tl.cdiv(end, T)
    if part_ptr is not None:
        per_split = tl.cdiv(end_tile - begin_tile, num_splits)
        begin_tile += split * per_split
        end_tile = tl.minimum(begin_tile + per_split, end_tile)
    for tile in range(begin_tile, end_tile):
        tokens, live, blocks, pages, slots = find_tokens(table_ptr, tail_table_ptr, tile, first, end, T, BLOCK_SIZE)
        behind = positions[:, None] - tokens[None, :]
        seen = (behind >= 0) & (behind < window) & live[None, :]
        low, high, most, total = take_stored(
            low, high, most, total, q_low, q_high, seen,
            elements_ptr, scales_ptr, tail_ptr, blocks, pages, slots, live, kv_head,
            block_stride, side_stride, scale_stride, scale_side_stride, tail_stride, tail_side_stride,
            scale, cap, HAS_CAP, PACKED, FLOAT, MOST, KV_HEADS, HEAD_DIM, DH, COMPUTE,
        )  # fmt: skip
    divisor = (tl.where(total > 0, total, 1.0) * MOST)[:, None]
    low, high = low / divisor, high / divisor
    if part_ptr is not None:
        part_rows = (q_rows * num_splits + split) * NUM_HEADS
        part_ptrs = part_ptr + part_rows[:, None] * HEAD_DIM + offsets
        tl.store(part_ptrs, low, mask=wanted)
        tl.store(part_ptrs + HALF, high, mask=wanted)
        lse = tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + part_rows + heads, lse, mask=(row_tokens < query_len) & (rows < TOKENS * GROUP))
    else:
        out_ptrs = out_ptr + q_rows[:, None] * NUM_HEADS * HEAD_DIM + offsets
        tl.store(out_ptrs, low.to(out_ptr.dtype.element_ty), mask=wanted)
        tl.store(out_ptrs + HALF, high.to(out_ptr.dtype.element_ty), mask=wanted)


def quantised_prefill(
    q: torch.Tensor,
    layer: QuantisedLayer,
    rows: QuantisedRows,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """The CUDA path of kernels.quantised.attention.quantised_prefill, with its arguments."""
    num_tokens, num_heads, head_dim = q.shape
    num_seqs = rows.seq_lens.shape[0]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_seqs == 0:
        return out
    layout, stored, constants = layer.layout, get_pointers(layer), make_constants(layer, q, soft_cap)
    group = constants["GROUP"]
    m = max(64, power_of_2(group))
    q = q if q.stride()[1:] == (head_dim, 1) else q.contiguous()
    before, after = Options(scale, window, soft_cap, None, None).factors
    programs = cdiv(num_tokens, m // group) + num_seqs
    most_tokens = min(rows.block_tables.shape[1] * layout.block_size, window or NO_WINDOW)
    splits, part, lse = plan_splits(out, busy_programs(num_tokens, m // group) * layout.num_kv_heads, most_tokens)
    quantised_prefill_kernel[programs, layout.num_kv_heads, splits](
        q,
        stored.elements,
        stored.scales,
        stored.tail,
        rows.block_tables,
        rows.tail_tables,
        rows.seq_lens,
        sink_logits,
        rows.query_start_loc,
        out,
        part,
        lse,
        num_seqs,
        splits,
        q.stride(0),
        rows.block_tables.stride(0),
        *stored.strides,
        before,
        after,
        window or NO_WINDOW,
        **constants,
        NUM_HEADS=num_heads,
        M=m,
        SEQS=_SEQS_AT_ONCE,
        num_warps=4 if constants["DH"] <= 64 else 8,  # with four, large heads spill
        num_stages=2,
    )
    if splits > 1:
        merge_items(part, lse, None, out, num_splits=splits)
    return out
