"""Attention over latent vectors on CUDA: one kernel for decode and prefill, which reads each latent once, as key and as value.

A program takes the heads of one query, as the rows of one matrix: all heads read the same key, so few tokens are enough to fill
matrix instructions. Latent and rotated part are two tiles, because together they are no power of two (512 and 64). Long
sequences of decode are cut into items and merged as those of paged_attention_decode are (FlashMLA and SGLang go the same way);
few queries of prefill on a long cached prefix are split by their keys as in paged_attention_prefill.
"""

import torch
import triton
import triton.language as tl

from ..scratch import Scratch
from .attention_tiles import COMPUTE_TYPES, LOG2_E, LOWEST, dense_heads, slot_offsets, take_tile
from .decode_work import DecodeWork, tile_tokens
from .paged_attention_decode import merge_items
from .paged_attention_prefill import plan_splits
from .sizes import cdiv, power_of_2

_SEQS_AT_ONCE = 256
_MOST_HEADS = 64  # rows of a program: those of one warp group's matrix instruction


@triton.jit(do_not_specialize=["table_stride", "num_seqs", "num_splits"])
def latent_attention_kernel(
    q_ptr,
    layer_ptr,
    table_ptr,
    len_ptr,
    loc_ptr,
    items_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    num_seqs,
    num_splits,
    q_stride,
    table_stride,
    block_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    M: tl.constexpr,
    LATENT: tl.constexpr,
    R: tl.constexpr,
    ROPE: tl.constexpr,
    P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    T: tl.constexpr,
    SEQS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """M heads of one query: with loc of a token of prefill, else of an item of decode's work list, or of a sequence.

    Writes to `part` and `lse` where its sequence has other items, else to `out`; see decode_kernel. Of prefill, where they are
    given, each program has one split of its query's tiles; see prefill_kernel.
    """
    item = tl.program_id(1)
    seq, row = item, item
    if items_ptr is not None:
        seq = tl.load(items_ptr + item * 4)
        if seq < 0:
            return
        row = seq
    if loc_ptr is not None:
        if item >= tl.load(loc_ptr + num_seqs):
            return
        num_begun = 0
        for begin_seq in range(0, num_seqs, SEQS):
            seqs = begin_seq + tl.arange(0, SEQS)
            locs = tl.load(loc_ptr + seqs, mask=seqs < num_seqs, other=0)
            num_begun += tl.sum(((locs <= item) & (seqs < num_seqs)).to(tl.int32), 0)
        seq = num_begun - 1
    num_tokens = tl.load(len_ptr + seq)
    if loc_ptr is not None:  # the query sees nothing behind itself
        num_tokens = num_tokens - (tl.load(loc_ptr + seq + 1) - 1 - item)
    begin, end, is_part = num_tokens * 0, tl.cdiv(num_tokens, T), num_tokens < 0
    if items_ptr is not None:
        begin, end = tl.load(items_ptr + item * 4 + 1), tl.load(items_ptr + item * 4 + 2)
        is_part = tl.load(items_ptr + item * 4 + 3) > 0
    part_item = item.to(tl.int64)
    if loc_ptr is not None and part_ptr is not None:
        per_split = tl.cdiv(end, num_splits)
        begin = tl.program_id(2) * per_split
        end, is_part = tl.minimum(begin + per_split, end), num_splits > 1
        part_item = part_item * num_splits + tl.program_id(2)

    heads = tl.program_id(0) * M + tl.arange(0, M)
    dims, turned = tl.arange(0, R), tl.arange(0, P)
    q_ptrs = q_ptr + row.to(tl.int64) * q_stride + heads[:, None] * (LATENT + ROPE)
    wanted = (heads < NUM_HEADS)[:, None] & (dims < LATENT)[None, :]
    q = tl.load(q_ptrs + dims[None, :], mask=wanted, other=0.0).to(COMPUTE)
    is_turned = (heads < NUM_HEADS)[:, None] & (turned < ROPE)[None, :]
    q_rope = tl.load(q_ptrs + LATENT + turned[None, :], mask=is_turned, other=0.0).to(COMPUTE)
    table_ptr += seq.to(tl.int64) * table_stride
    acc = tl.zeros([M, R], tl.float32)
    most = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    for tile in range(begin, end):
        tokens, offsets = slot_offsets(table_ptr, tile, num_tokens, block_stride, T, BLOCK_SIZE, LATENT + ROPE)
        live = tokens < num_tokens
        ptrs = layer_ptr + offsets[:, None]
        k = tl.load(ptrs + dims[None, :], mask=live[:, None] & (dims < LATENT)[None, :], other=0.0).to(COMPUTE)
        k_rope = tl.load(ptrs + LATENT + turned[None, :], mask=live[:, None] & (turned < ROPE)[None, :], other=0.0).to(COMPUTE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee") * scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        acc, most, total = take_tile(acc, most, total, scores, k, COMPUTE)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    if lse_ptr is not None:  # noqa: SIM102  # known when the kernel is compiled; the next one is not
        if is_part:
            part_heads = part_item * NUM_HEADS + heads
            tl.store(part_ptr + part_heads[:, None] * LATENT + dims[None, :], out, mask=wanted)
            lse = tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
            tl.store(lse_ptr + part_heads, lse, mask=heads < NUM_HEADS)
    if not is_part:
        out_heads = row.to(tl.int64) * NUM_HEADS + heads
        tl.store(out_ptr + out_heads[:, None] * LATENT + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=wanted)


def latent_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    latent: int,
    scratch: Scratch,
    work: DecodeWork | None,
) -> torch.Tensor:
    """The CUDA path of kernels.attention.latent_attention.latent_attention_decode, with its arguments."""
    num_seqs, num_heads, _ = q.shape
    out = torch.empty((num_seqs, num_heads, latent), dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    if work is None:
        _launch(q, kv_layer, block_tables, seq_lens, scale, out, num_seqs)
        return out
    num_parts = work.items.shape[0] * num_heads
    part, lse = scratch.take(num_parts * (latent + 1), torch.float32).split([num_parts * latent, num_parts])
    parts = {"items": work.items, "part": part, "lse": lse}
    _launch(q, kv_layer, block_tables, seq_lens, scale, out, work.items.shape[0], **parts)
    merge_items(part, lse, work.runs, out)
    return out


def latent_prefill(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    latent: int,
) -> torch.Tensor:
    """The CUDA path of kernels.attention.latent_attention.latent_attention_prefill, with its arguments."""
    num_tokens, num_heads, _ = q.shape
    out = torch.empty((num_tokens, num_heads, latent), dtype=q.dtype, device=q.device)
    if num_tokens == 0 or seq_lens.shape[0] == 0:
        return out
    most_tokens = block_tables.shape[1] * kv_layer.shape[2]
    splits, part, lse = plan_splits(out, num_tokens * cdiv(num_heads, _rows_for(num_heads)), most_tokens)
    tensors = (q, kv_layer, block_tables, seq_lens)
    _launch(*tensors, scale, out, num_tokens, locs=query_start_loc, part=part, lse=lse, splits=splits)
    if splits > 1:
        merge_items(part, lse, None, out, num_splits=splits)
    return out


def _rows_for(num_heads: int) -> int:
    """Heads of a program, as rows of a matrix."""
    return min(max(power_of_2(num_heads), 16), _MOST_HEADS)


def _launch(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    num_programs: int,
    *,
    locs: torch.Tensor | None = None,
    items: torch.Tensor | None = None,
    part: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    splits: int = 1,
) -> None:
    """num_programs: for each block of heads. splits: of the keys of each, with locs alone."""
    q = dense_heads(q)
    num_heads, width = q.shape[1:]
    latent = out.shape[2]
    rows = _rows_for(num_heads)
    latent_attention_kernel[cdiv(num_heads, rows), num_programs, splits](
        q,
        kv_layer,
        block_tables,
        seq_lens,
        locs,
        items,
        out,
        part,
        lse,
        seq_lens.shape[0],
        splits,
        q.stride(0),
        block_tables.stride(0),
        kv_layer.stride(0),
        scale * LOG2_E,
        NUM_HEADS=num_heads,
        M=rows,
        LATENT=latent,
        R=max(power_of_2(latent), 16),
        ROPE=width - latent,
        P=max(power_of_2(width - latent), 16),
        BLOCK_SIZE=kv_layer.shape[2],
        T=tile_tokens(width),
        SEQS=_SEQS_AT_ONCE,
        COMPUTE=COMPUTE_TYPES[q.dtype],
        num_warps=8 if rows == _MOST_HEADS else 4,
        num_stages=2,
    )
