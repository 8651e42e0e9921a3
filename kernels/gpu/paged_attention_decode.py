"""paged_attention_decode on CUDA: split-KV attention of one query per sequence, its heads of one KV head as one matrix.

Decode is bound by reading K and V. The query heads of a KV head are packed into the rows of one 16-row matrix product, so
that K and V are read once; and long sequences are cut into items (decode_work), so that few of them fill the device too. Each
item writes its part and its log-sum-exp, and a second kernel merges the parts (Flash-Decoding; FlashInfer, arXiv 2501.01005).
"""

import torch
import triton
import triton.language as tl

from ..scratch import Scratch
from .attention_tiles import (
    COMPUTE_TYPES,
    LOWEST,
    NO_WINDOW,
    Options,
    begin_rows,
    dense_heads,
    slot_offsets,
    take_tile,
    tile_scores,
)
from .decode_work import DecodeWork, tile_tokens, visible_tiles
from .shared_prefix import MEMBERS, SharedWork, members_at_once, shared_kernel
from .sizes import cdiv, power_of_2

_MERGED_AT_ONCE = 16


@triton.jit
def _take_tiles(
    acc,
    most,
    total,
    q,
    k_ptr,
    table_ptr,
    first_tile,
    end_tile,
    first,
    end,
    block_stride,
    kv_stride,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    SLOT_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    T: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Take the tokens [first, end) of the tiles [first_tile, end_tile) into the running softmax."""
    dims = tl.arange(0, D)
    for tile in range(first_tile, end_tile):
        tokens, offsets = slot_offsets(table_ptr, tile, end, block_stride, T, BLOCK_SIZE, SLOT_LEN)
        live = (tokens >= first) & (tokens < end)
        wanted = live[:, None] & (dims < HEAD_DIM)[None, :]
        ptrs = k_ptr + offsets[:, None] + dims[None, :]
        k = tl.load(ptrs, mask=wanted, other=0.0).to(COMPUTE)
        v = tl.load(ptrs + kv_stride, mask=wanted, other=0.0).to(COMPUTE)
        scores = tl.where(live[None, :], tile_scores(q, k, scale, cap, HAS_CAP), float("-inf"))
        acc, most, total = take_tile(acc, most, total, scores, v, COMPUTE)
    return acc, most, total


@triton.jit(do_not_specialize=["table_stride", "window"])
def decode_kernel(
    q_ptr,
    q_sink_ptr,
    layer_ptr,
    table_ptr,
    len_ptr,
    sink_len_ptr,
    window_len_ptr,
    logit_ptr,
    items_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    q_stride,
    q_sink_stride,
    table_stride,
    block_stride,
    kv_stride,
    scale,
    cap,
    window,
    HAS_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    SLOT_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    T: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One KV head, one item of the work list, or one sequence where there is no list.

    Writes to `part` and `lse` where its sequence has other items, else to `out`. part: float32 [W, H, HEAD_DIM], the normalised
    output of the item; lse: float32 [W, H], the logarithm to base 2 of its sum.
    """
    kv_head, item = tl.program_id(0), tl.program_id(1)
    seq = item
    if items_ptr is not None:
        seq = tl.load(items_ptr + item * 4)
        if seq < 0:
            return
    seq_len = tl.load(len_ptr + seq)
    sink_len, own_window = seq_len * 0, seq_len * 0
    if sink_len_ptr is not None:
        sink_len, own_window = tl.load(sink_len_ptr + seq), tl.load(window_len_ptr + seq)
    # Tiles in the order they are taken: those of the sinks that the window has left, then those of the window.
    first, num_sinks, num_tiles = visible_tiles(seq_len, sink_len, own_window, window, T)
    num_sink_tiles = tl.cdiv(num_sinks, T)
    first_tile = first // T
    begin, end, is_part = num_tiles * 0, num_tiles, num_tiles < 0
    if items_ptr is not None:
        begin, end = tl.load(items_ptr + item * 4 + 1), tl.load(items_ptr + item * 4 + 2)
        is_part = tl.load(items_ptr + item * 4 + 3) > 0

    rows, dims = tl.arange(0, M), tl.arange(0, D)
    num_heads = tl.num_programs(0) * GROUP
    heads = kv_head * GROUP + rows
    table_ptr += seq.to(tl.int64) * table_stride
    k_ptr = layer_ptr + kv_head * HEAD_DIM
    wanted = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    acc = tl.zeros([M, D], tl.float32)
    most, total = begin_rows(logit_ptr, heads, rows < GROUP, begin == 0, M)
    if sink_len_ptr is not None:
        q_sink = tl.load(q_sink_ptr + seq.to(tl.int64) * q_sink_stride + q_offsets, mask=wanted, other=0.0).to(COMPUTE)
        acc, most, total = _take_tiles(
            acc,
            most,
            total,
            q_sink,
            k_ptr,
            table_ptr,
            begin,
            tl.minimum(end, num_sink_tiles),
            0,
            num_sinks,
            block_stride,
            kv_stride,
            scale,
            cap,
            HAS_CAP,
            HEAD_DIM,
            D,
            SLOT_LEN,
            BLOCK_SIZE,
            T,
            COMPUTE,
        )
    q = tl.load(q_ptr + seq.to(tl.int64) * q_stride + q_offsets, mask=wanted, other=0.0).to(COMPUTE)
    to_window = first_tile - num_sink_tiles
    acc, most, total = _take_tiles(
        acc,
        most,
        total,
        q,
        k_ptr,
        table_ptr,
        tl.maximum(begin, num_sink_tiles) + to_window,
        end + to_window,
        first,
        seq_len,
        block_stride,
        kv_stride,
        scale,
        cap,
        HAS_CAP,
        HEAD_DIM,
        D,
        SLOT_LEN,
        BLOCK_SIZE,
        T,
        COMPUTE,
    )
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    if lse_ptr is not None:  # noqa: SIM102  # known when the kernel is compiled; the next one is not
        if is_part:
            part_heads = item.to(tl.int64) * num_heads + heads
            tl.store(part_ptr + part_heads[:, None] * HEAD_DIM + dims[None, :], out, mask=wanted)
            tl.store(lse_ptr + part_heads, most + tl.log2(total), mask=rows < GROUP)
    if not is_part:
        out_heads = seq.to(tl.int64) * num_heads + heads
        tl.store(out_ptr + out_heads[:, None] * HEAD_DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def _take_parts(
    acc,
    most,
    total,
    part_ptr,
    lse_ptr,
    first,
    stride,
    num_items,
    num_heads,
    head,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Take the parts first, first + stride and so on into the merged output."""
    dims = tl.arange(0, D)
    for begin in range(0, num_items, AT_ONCE):
        items = begin + tl.arange(0, AT_ONCE)
        rows = (first + items * stride) * num_heads + head
        lse = tl.load(lse_ptr + rows, mask=items < num_items, other=float("-inf"))
        new_most = tl.maximum(most, tl.max(lse, 0))
        weights, decay = tl.exp2(lse - new_most), tl.exp2(most - new_most)
        wanted = (weights > 0)[:, None] & (dims < HEAD_DIM)[None, :]
        parts = tl.load(part_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=wanted, other=0.0)
        acc = acc * decay + tl.sum(weights[:, None] * parts, 0)
        total = total * decay + tl.sum(weights, 0)
        most = new_most
    return acc, most, total


@triton.jit(do_not_specialize=["num_splits", "num_own"])
def merge_items_kernel(
    part_ptr,
    lse_ptr,
    runs_ptr,
    member_ptr,
    shared_runs_ptr,
    out_ptr,
    num_splits,
    num_own,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Merge the items of one sequence, one head; the layout is decode_kernel's. A sequence of one item is in `out` already.

    Without runs each sequence, or query, has num_splits items, one behind the other. With member_ptr, a sequence may have a
    share in further items (shared_prefix.py), whose parts, MEMBERS of each, are behind num_own parts.
    """
    head, seq, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    num_items, first = num_splits, seq.to(tl.int64) * num_splits
    if runs_ptr is not None:
        num_items = tl.load(runs_ptr + seq * 2 + 1)
        first = tl.load(runs_ptr + seq * 2).to(tl.int64)
    shared_tiles = seq * 0
    if member_ptr is not None:
        shared_tiles = tl.load(member_ptr + seq * 4)
    if (num_items <= 1) & (shared_tiles == 0):
        return
    acc = tl.zeros([D], tl.float32)
    most, total = tl.full([], LOWEST, tl.float32), tl.full([], 0.0, tl.float32)
    acc, most, total = _take_parts(
        acc, most, total, part_ptr, lse_ptr, first, 1, num_items, num_heads, head, HEAD_DIM, D, AT_ONCE
    )
    if member_ptr is not None:  # noqa: SIM102  # known when the kernel is compiled; the next one is not
        if shared_tiles > 0:
            place, member = tl.load(member_ptr + seq * 4 + 1), tl.load(member_ptr + seq * 4 + 2)
            run_ptr = shared_runs_ptr + (place - member) * 2
            first = num_own + tl.load(run_ptr).to(tl.int64) * MEMBERS + member
            acc, most, total = _take_parts(
                acc, most, total, part_ptr, lse_ptr, first, MEMBERS, tl.load(run_ptr + 1), num_heads, head, HEAD_DIM, D, AT_ONCE
            )
    out = acc / tl.where(total > 0, total, 1.0)
    dims = tl.arange(0, D)
    out_row = seq.to(tl.int64) * num_heads + head
    tl.store(out_ptr + out_row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def merge_items(
    part: torch.Tensor | None,
    lse: torch.Tensor | None,
    runs: torch.Tensor | None,
    out: torch.Tensor,
    *,
    num_splits: int = 0,
    num_own: int = 0,
    shared: SharedWork | None = None,
) -> None:
    """Launch merge_items_kernel for out [S, H, HEAD_DIM]. num_own: parts before those of `shared`."""
    num_rows, num_heads, head_dim = out.shape
    merge_items_kernel[num_heads, num_rows](
        part,
        lse,
        runs,
        None if shared is None else shared.members,
        None if shared is None else shared.runs,
        out,
        num_splits,
        num_own,
        HEAD_DIM=head_dim,
        D=power_of_2(head_dim),
        AT_ONCE=_MERGED_AT_ONCE,
        MEMBERS=MEMBERS,
        num_warps=4,
    )


def paged_attention_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    options: Options,
    scratch: Scratch,
    work: DecodeWork | None,
) -> torch.Tensor:
    """The CUDA path of kernels.attention.paged_attention_decode, with its arguments."""
    num_seqs, num_heads, head_dim = q.shape
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    num_kv_heads, block_size = kv_layer.shape[3], kv_layer.shape[2]
    group, dims = num_heads // num_kv_heads, power_of_2(head_dim)
    part, lse, num_own, shared = None, None, 0, None
    if work is not None:
        num_own, shared = work.items.shape[0], work.shared
        num_parts = (num_own + (0 if shared is None else shared.items.shape[0] * MEMBERS)) * num_heads
        part, lse = scratch.take(num_parts * (head_dim + 1), torch.float32).split([num_parts * head_dim, num_parts])
    q = dense_heads(q)
    q_sink = None if options.q_sink is None else dense_heads(options.q_sink)
    sink_lens, window_lens = options.retention or (None, None)
    before, after = options.factors
    decode_kernel[num_kv_heads, num_seqs if work is None else num_own](
        q,
        q_sink,
        kv_layer,
        block_tables,
        seq_lens,
        sink_lens,
        window_lens,
        options.sink_logits,
        None if work is None else work.items,
        out,
        part,
        lse,
        q.stride(0),
        0 if q_sink is None else q_sink.stride(0),
        block_tables.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        before,
        after,
        options.window or NO_WINDOW,
        HAS_CAP=options.soft_cap is not None,
        GROUP=group,
        M=max(power_of_2(group), 16),
        HEAD_DIM=head_dim,
        D=dims,
        SLOT_LEN=num_kv_heads * head_dim,
        BLOCK_SIZE=block_size,
        T=tile_tokens(head_dim),
        COMPUTE=COMPUTE_TYPES[q.dtype],
        num_warps=4 if options.retention is None else 8,  # with four, its loop over sinks spills
        num_stages=3 if dims <= 128 else 5,  # a block is looked up before it is read: with five, two tiles are on their way
    )
    if shared is not None:
        at_once = members_at_once(group)
        shared_kernel[num_kv_heads, shared.items.shape[0], cdiv(MEMBERS, at_once)](
            q,
            kv_layer,
            block_tables,
            options.sink_logits,
            shared.order,
            shared.items,
            part,
            lse,
            num_own,
            q.stride(0),
            block_tables.stride(0),
            kv_layer.stride(0),
            kv_layer.stride(1),
            before,
            after,
            HAS_CAP=options.soft_cap is not None,
            GROUP=group,
            GROUP_ROWS=power_of_2(group),
            AT_ONCE=at_once,
            MEMBERS=MEMBERS,
            HEAD_DIM=head_dim,
            D=dims,
            SLOT_LEN=num_kv_heads * head_dim,
            BLOCK_SIZE=block_size,
            T=tile_tokens(head_dim),
            COMPUTE=COMPUTE_TYPES[q.dtype],
            num_warps=8,
            num_stages=5 if dims == 256 else 3,
        )
    if work is not None:
        merge_items(part, lse, work.runs, out, num_own=num_own, shared=shared)
    return out
