"""paged_attention_decode on CUDA: split-KV attention of one query per sequence, its heads of one KV head as one matrix.

Decode is bound by reading K and V. The query heads of a KV head are packed into the rows of one 16-row matrix product, so
that K and V are read once; and a sequence is cut into splits, so that few long sequences fill the device too. Each split writes
its part and its log-sum-exp, and a second kernel merges the parts (Flash-Decoding; FlashInfer, arXiv 2501.01005).
"""

import functools

import torch
import triton
import triton.language as tl

from ..scratch import Scratch
from .attention_tiles import COMPUTE_TYPES, LOWEST, NO_WINDOW, Options, dense_heads, slot_offsets, take_tile, tile_scores
from .sizes import cdiv, power_of_2

_MOST_SPLITS = 64
_FEWEST_SPLIT_TOKENS = 256  # of a split: below that, merging costs more than it gains
_PROGRAMS_PER_MULTIPROCESSOR = 2
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


@triton.jit(do_not_specialize=["table_stride", "window", "num_splits"])
def decode_kernel(
    q_ptr,
    q_sink_ptr,
    layer_ptr,
    table_ptr,
    len_ptr,
    sink_len_ptr,
    window_len_ptr,
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
    num_splits,
    HAS_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    SLOT_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    T: tl.constexpr,
    FEWEST_TILES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One KV head, one sequence, one split. Writes to `part` and `lse` where they are given, else to `out`.

    part: float32 [S, H, num_splits, HEAD_DIM], the normalised output of the split; lse: float32 [S, H, num_splits], the
    logarithm to base 2 of its sum, -inf for a split without tokens, whose part is not written.
    """
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(len_ptr + seq)
    num_sinks = 0
    if sink_len_ptr is not None:
        own_window = tl.load(window_len_ptr + seq)
        if own_window > 0:
            window = own_window
            num_sinks = tl.minimum(tl.load(sink_len_ptr + seq), tl.maximum(seq_len - window, 0))
    first = tl.maximum(seq_len - window, 0)
    # Tiles in the order they are taken: those of the sinks that the window has left, then those of the window.
    num_sink_tiles = tl.cdiv(num_sinks, T)
    first_tile = first // T
    num_tiles = num_sink_tiles + tl.cdiv(seq_len, T) - first_tile
    per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), FEWEST_TILES)
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_tiles)

    rows, dims = tl.arange(0, M), tl.arange(0, D)
    heads = (seq * tl.num_programs(0) + kv_head).to(tl.int64) * GROUP + rows  # of all heads of all sequences
    if lse_ptr is not None and begin >= end:
        tl.store(lse_ptr + heads * num_splits + split, tl.full([M], float("-inf"), tl.float32), mask=rows < GROUP)
        return
    table_ptr += seq.to(tl.int64) * table_stride
    k_ptr = layer_ptr + kv_head * HEAD_DIM
    wanted = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = (kv_head * GROUP + rows)[:, None] * HEAD_DIM + dims[None, :]
    acc = tl.zeros([M, D], tl.float32)
    most = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
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
    if lse_ptr is not None:
        tl.store(part_ptr + (heads * num_splits + split)[:, None] * HEAD_DIM + dims[None, :], out, mask=wanted)
        tl.store(lse_ptr + heads * num_splits + split, most + tl.log2(total), mask=rows < GROUP)
    else:
        tl.store(out_ptr + heads[:, None] * HEAD_DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merge the splits of one head of one sequence; the layout is decode_kernel's. No split has tokens: zeros."""
    head = tl.program_id(0).to(tl.int64)
    lse_ptr += head * num_splits
    part_ptr += head * num_splits * HEAD_DIM
    splits, dims = tl.arange(0, MOST_SPLITS), tl.arange(0, D)
    lse = tl.load(lse_ptr + splits, mask=splits < num_splits, other=float("-inf"))
    most = tl.maximum(tl.max(lse, 0), LOWEST)
    total = tl.sum(tl.exp2(lse - most), 0)
    acc = tl.zeros([AT_ONCE, D], tl.float32)
    for begin in range(0, num_splits, AT_ONCE):
        chunk = begin + tl.arange(0, AT_ONCE)
        weights = tl.exp2(tl.load(lse_ptr + chunk, mask=chunk < num_splits, other=float("-inf")) - most)
        wanted = (weights > 0)[:, None] & (dims < HEAD_DIM)[None, :]
        acc += weights[:, None] * tl.load(part_ptr + chunk[:, None] * HEAD_DIM + dims[None, :], mask=wanted, other=0.0)
    out = tl.sum(acc, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + head * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def splits_for(num_seqs: int, num_kv_heads: int, most_tokens: int, num_multiprocessors: int) -> int:
    """How many splits fill the device, for sequences of at most so many visible tokens: known without their lengths."""
    wanted = cdiv(_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors, num_seqs * num_kv_heads)
    return min(wanted, cdiv(most_tokens, _FEWEST_SPLIT_TOKENS), _MOST_SPLITS)


def paged_attention_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    options: Options,
    scratch: Scratch,
) -> torch.Tensor:
    """The CUDA path of kernels.attention.paged_attention_decode, with its arguments."""
    num_seqs, num_heads, head_dim = q.shape
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    num_kv_heads, block_size = kv_layer.shape[3], kv_layer.shape[2]
    group, dims = num_heads // num_kv_heads, power_of_2(head_dim)
    tile = 64 if dims <= 128 else 32
    most_tokens = min(block_tables.shape[1] * block_size, options.window or NO_WINDOW)
    splits = splits_for(num_seqs, num_kv_heads, most_tokens, num_multiprocessors(q.device))
    part, lse = None, None
    if splits > 1:
        num_parts = num_seqs * num_heads * splits
        part, lse = scratch.take(num_parts * (head_dim + 1), torch.float32).split([num_parts * head_dim, num_parts])
    q = dense_heads(q)
    q_sink = None if options.q_sink is None else dense_heads(options.q_sink)
    sink_lens, window_lens = options.retention or (None, None)
    before, after = options.factors
    decode_kernel[num_kv_heads, num_seqs, splits](
        q,
        q_sink,
        kv_layer,
        block_tables,
        seq_lens,
        sink_lens,
        window_lens,
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
        splits,
        HAS_CAP=options.soft_cap is not None,
        GROUP=group,
        M=max(power_of_2(group), 16),
        HEAD_DIM=head_dim,
        D=dims,
        SLOT_LEN=num_kv_heads * head_dim,
        BLOCK_SIZE=block_size,
        T=tile,
        FEWEST_TILES=_FEWEST_SPLIT_TOKENS // tile,
        COMPUTE=COMPUTE_TYPES[q.dtype],
        num_warps=4,
        num_stages=5,  # a block is looked up before it is read: with five, two tiles are on their way
    )
    if splits > 1:
        merge_splits_kernel[(num_seqs * num_heads,)](
            part,
            lse,
            out,
            splits,
            HEAD_DIM=head_dim,
            D=dims,
            MOST_SPLITS=_MOST_SPLITS,
            AT_ONCE=_MERGED_AT_ONCE,
            num_warps=4,
        )
    return out
