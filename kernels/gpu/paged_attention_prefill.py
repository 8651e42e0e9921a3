"""paged_attention_prefill on CUDA: ragged causal attention over a cached prefix and the queries' own keys.

A program takes the queries of several tokens, all heads of one KV head as the rows of one matrix. Tiles that all its rows see
whole come first, without a mask; tiles on the diagonal and at the edge of a window are masked (FlashAttention-2, arXiv
2307.08691). Few queries on a long cached prefix are too few programs: then the keys of each are split over several, whose parts
are merged as those of decode are.
"""

import torch
import triton
import triton.language as tl

from .attention_tiles import COMPUTE_TYPES, NO_WINDOW, Options, begin_rows, dense_heads, slot_offsets, take_tile, tile_scores
from .decode_work import PROGRAMS_PER_MULTIPROCESSOR, num_multiprocessors
from .paged_attention_decode import merge_items
from .sizes import cdiv, power_of_2
from .variants import prefill_shape

_SEQS_AT_ONCE = 256
_FEWEST_SPLIT_TOKENS = 1024  # visible keys: below that, merging costs more than it gains
_MOST_SPLIT_QUERIES = 512  # tokens: more of them fill the device, and their parts would take much memory


@triton.jit
def _take_tiles(
    acc,
    most,
    total,
    q,
    positions,
    k_ptr,
    table_ptr,
    first_tile,
    end_tile,
    first,
    end,
    window,
    num_sinks,
    block_stride,
    kv_stride,
    scale,
    cap,
    MASKED: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    SLOT_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    T: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Take the tokens of the tiles [first_tile, end_tile) into the running softmax.

    MASKED: of the tokens [first, end), those that each row sees: up to its position and within its window. Other tokens may lie
    in blocks that were given back, and are not read. SINKS: of the first num_sinks tokens, those that each row's window has
    left. Neither: all of them.
    """
    dims = tl.arange(0, D)
    for tile in range(first_tile, end_tile):
        tokens, offsets = slot_offsets(table_ptr, tile, end, block_stride, T, BLOCK_SIZE, SLOT_LEN)
        ptrs = k_ptr + offsets[:, None] + dims[None, :]
        wanted = (dims < HEAD_DIM)[None, :]
        if MASKED:
            wanted &= ((tokens >= first) & (tokens < end))[:, None]
        k = tl.load(ptrs, mask=wanted, other=0.0).to(COMPUTE)
        v = tl.load(ptrs + kv_stride, mask=wanted, other=0.0).to(COMPUTE)
        scores = tile_scores(q, k, scale, cap, HAS_CAP)
        if MASKED:
            behind = positions[:, None] - tokens[None, :]
            if SINKS:
                seen = (behind >= window) & (tokens < num_sinks)[None, :]
            else:
                seen = (behind >= 0) & (behind < window)
            scores = tl.where(seen, scores, float("-inf"))
        acc, most, total = take_tile(acc, most, total, scores, v, COMPUTE)
    return acc, most, total


@triton.jit
def find_sequence(loc_ptr, num_seqs, program, TOKENS: tl.constexpr, SEQS: tl.constexpr):
    """The sequence whose tokens a program takes: sequence s has the programs from loc[s] // TOKENS + s on.

    That gives each sequence at least as many programs as it needs, and the grid follows from shapes alone.
    """
    num_begun = 0
    for first in range(0, num_seqs, SEQS):
        seqs = first + tl.arange(0, SEQS)
        locs = tl.load(loc_ptr + seqs, mask=seqs < num_seqs, other=0)
        num_begun += tl.sum(((locs // TOKENS + seqs <= program) & (seqs < num_seqs)).to(tl.int32), 0)
    return num_begun - 1


@triton.jit(do_not_specialize=["table_stride", "window", "num_seqs", "num_splits"])
def prefill_kernel(
    q_ptr,
    q_sink_ptr,
    layer_ptr,
    table_ptr,
    len_ptr,
    loc_ptr,
    sink_len_ptr,
    window_len_ptr,
    logit_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    num_seqs,
    num_splits,
    q_stride,
    q_sink_stride,
    table_stride,
    block_stride,
    kv_stride,
    scale,
    cap,
    window,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    SLOT_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    T: tl.constexpr,
    SEQS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """M // GROUP tokens of one sequence, the heads of one KV head. The last tokens see most keys, so they begin first.

    Writes to `part` and `lse` where they are given, one split of the tiles, else to `out`. part: float32 [T, num_splits,
    NUM_HEADS, HEAD_DIM], normalised; lse: float32 [T, num_splits, NUM_HEADS], the logarithm to base 2 of its sum, -inf without
    keys.
    """
    TOKENS: tl.constexpr = M // GROUP
    program, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    seq = find_sequence(loc_ptr, num_seqs, program, TOKENS, SEQS)
    loc = tl.load(loc_ptr + seq)
    query_len = tl.load(loc_ptr + seq + 1) - loc
    first_token = (program - loc // TOKENS - seq) * TOKENS
    if first_token >= query_len:
        return
    context_len = tl.load(len_ptr + seq) - query_len

    rows, dims = tl.arange(0, M), tl.arange(0, D)
    row_tokens = first_token + rows // GROUP
    positions = context_len + row_tokens
    low, high = context_len + first_token, context_len + tl.minimum(first_token + TOKENS, query_len) - 1
    heads = kv_head * GROUP + rows % GROUP
    wanted = ((row_tokens < query_len) & (rows < TOKENS * GROUP))[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = (loc + row_tokens).to(tl.int64)
    q_offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    table_ptr += seq.to(tl.int64) * table_stride
    k_ptr = layer_ptr + kv_head * HEAD_DIM
    acc = tl.zeros([M, D], tl.float32)
    split = tl.program_id(2)
    most, total = begin_rows(logit_ptr, heads, rows < TOKENS * GROUP, split == 0, M)

    if sink_len_ptr is not None:
        own_window = tl.load(window_len_ptr + seq)
        if own_window > 0:
            window = own_window
            num_sinks = tl.minimum(tl.load(sink_len_ptr + seq), tl.maximum(high - window + 1, 0))
            q_sink = tl.load(q_sink_ptr + q_rows[:, None] * q_sink_stride + q_offsets, mask=wanted, other=0.0).to(COMPUTE)
            acc, most, total = _take_tiles(
                acc,
                most,
                total,
                q_sink,
                positions,
                k_ptr,
                table_ptr,
                0,
                tl.where(split == 0, tl.cdiv(num_sinks, T), 0),
                0,
                num_sinks,
                window,
                num_sinks,
                block_stride,
                kv_stride,
                scale,
                cap,
                True,
                True,
                HAS_CAP,
                HEAD_DIM,
                D,
                SLOT_LEN,
                BLOCK_SIZE,
                T,
                COMPUTE,
            )
    q = tl.load(q_ptr + q_rows[:, None] * q_stride + q_offsets, mask=wanted, other=0.0).to(COMPUTE)
    first = tl.maximum(low - window + 1, 0)
    first_whole, end_whole = 0, (low + 1) // T  # tiles that all rows see whole
    begin, end = 0, tl.cdiv(high + 1, T)  # tiles of this split
    if part_ptr is not None:
        first_seen = first // T
        per_split = tl.cdiv(end - first_seen, num_splits)
        begin = first_seen + split * per_split
        end = tl.minimum(begin + per_split, end)
    if HAS_WINDOW:
        first_tile = first // T
        first_whole = tl.minimum(tl.cdiv(tl.maximum(high - window + 1, 0), T), end_whole)
        acc, most, total = _take_tiles(
            acc,
            most,
            total,
            q,
            positions,
            k_ptr,
            table_ptr,
            tl.maximum(first_tile, begin),
            tl.minimum(first_whole, end),
            first,
            high + 1,
            window,
            0,
            block_stride,
            kv_stride,
            scale,
            cap,
            True,
            False,
            HAS_CAP,
            HEAD_DIM,
            D,
            SLOT_LEN,
            BLOCK_SIZE,
            T,
            COMPUTE,
        )
    acc, most, total = _take_tiles(
        acc,
        most,
        total,
        q,
        positions,
        k_ptr,
        table_ptr,
        tl.maximum(first_whole, begin),
        tl.minimum(end_whole, end),
        first,
        high + 1,
        window,
        0,
        block_stride,
        kv_stride,
        scale,
        cap,
        False,
        False,
        HAS_CAP,
        HEAD_DIM,
        D,
        SLOT_LEN,
        BLOCK_SIZE,
        T,
        COMPUTE,
    )
    acc, most, total = _take_tiles(
        acc,
        most,
        total,
        q,
        positions,
        k_ptr,
        table_ptr,
        tl.maximum(end_whole, begin),
        end,
        first,
        high + 1,
        window,
        0,
        block_stride,
        kv_stride,
        scale,
        cap,
        True,
        False,
        HAS_CAP,
        HEAD_DIM,
        D,
        SLOT_LEN,
        BLOCK_SIZE,
        T,
        COMPUTE,
    )
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    if part_ptr is not None:
        part_rows = (q_rows * num_splits + split) * NUM_HEADS
        tl.store(part_ptr + part_rows[:, None] * HEAD_DIM + q_offsets, out, mask=wanted)
        is_live = (row_tokens < query_len) & (rows < TOKENS * GROUP)
        lse = tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + part_rows + heads, lse, mask=is_live)
    else:
        out_offsets = q_rows[:, None] * NUM_HEADS * HEAD_DIM + q_offsets
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=wanted)


def num_splits_for(num_queries: int, num_programs: int, most_tokens: int, multiprocessors: int) -> int:
    """Over how many programs the keys of each query are split, where a sequence has most_tokens visible ones; 1: not at all."""
    if num_queries > _MOST_SPLIT_QUERIES:
        return 1
    return max(min(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // num_programs, most_tokens // _FEWEST_SPLIT_TOKENS), 1)


def busy_programs(num_tokens: int, tokens_of_one: int) -> int:
    """How many programs of a KV head have queries, if they are of one sequence; of several, more are begun, and few are idle.

    The tokens say it and not the sequences, of which a captured step has as many as it may ever have.
    """
    return cdiv(num_tokens, tokens_of_one) + 1


def plan_splits(out: torch.Tensor, num_programs: int, most_tokens: int) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
    """num_splits_for the queries of out [T, H, HEAD_DIM], and part and lse of prefill_kernel where there are several."""
    splits = num_splits_for(out.shape[0], num_programs, most_tokens, num_multiprocessors(out.device))
    if splits == 1:
        return 1, None, None
    num_tokens, num_heads, head_dim = out.shape
    part = torch.empty((num_tokens, splits, num_heads, head_dim), dtype=torch.float32, device=out.device)
    return splits, part, torch.empty((num_tokens, splits, num_heads), dtype=torch.float32, device=out.device)


def paged_attention_prefill(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """The CUDA path of kernels.attention.paged_attention_prefill, with its arguments."""
    num_tokens, num_heads, head_dim = q.shape
    num_seqs = seq_lens.shape[0]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_seqs == 0:
        return out
    num_kv_heads, block_size = kv_layer.shape[3], kv_layer.shape[2]
    group, dims = num_heads // num_kv_heads, power_of_2(head_dim)
    has_cap, has_window = options.soft_cap is not None, options.window is not None or options.retention is not None
    is_crowded = has_cap and options.retention is not None
    is_plain = not has_cap and not has_window
    shape = prefill_shape(num_tokens, num_seqs, group, dims, is_plain=is_plain, is_crowded=is_crowded)
    q = dense_heads(q)
    q_sink = None if options.q_sink is None else dense_heads(options.q_sink)
    sink_lens, window_lens = options.retention or (None, None)
    before, after = options.factors
    programs = cdiv(num_tokens, shape.rows // group) + num_seqs
    most_tokens = min(block_tables.shape[1] * block_size, options.window or NO_WINDOW)
    splits, part, lse = plan_splits(out, busy_programs(num_tokens, shape.rows // group) * num_kv_heads, most_tokens)
    prefill_kernel[programs, num_kv_heads, splits](
        q,
        q_sink,
        kv_layer,
        block_tables,
        seq_lens,
        query_start_loc,
        sink_lens,
        window_lens,
        options.sink_logits,
        out,
        part,
        lse,
        num_seqs,
        splits,
        q.stride(0),
        0 if q_sink is None else q_sink.stride(0),
        block_tables.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        before,
        after,
        options.window or NO_WINDOW,
        HAS_WINDOW=has_window,
        HAS_CAP=has_cap,
        NUM_HEADS=num_heads,
        GROUP=group,
        M=shape.rows,
        HEAD_DIM=head_dim,
        D=dims,
        SLOT_LEN=num_kv_heads * head_dim,
        BLOCK_SIZE=block_size,
        T=shape.tile,
        SEQS=_SEQS_AT_ONCE,
        COMPUTE=COMPUTE_TYPES[q.dtype],
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if splits > 1:
        merge_items(part, lse, None, out, num_splits=splits)
    return out
