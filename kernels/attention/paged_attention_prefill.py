"""paged_attention_prefill: several queries per sequence (ragged), causal, over a cached prefix and their own keys.

The CPU path gathers a sequence's keys and values once and runs torch's fused attention on them for at most _MOST_QUERIES
queries at a time. Rows and masks are the same for all layers and are planned once per step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..checks import on_cuda, require, require_index, require_kv_layer, require_sink_logits, slot_rows
from ..scratch import Scratch
from .dense_attention import dense_attention
from .paged_rows import Int64Array, kv_slot_rows, require_tables
from .retention import Retention, kept_of, require_retention

_OP = "paged_attention_prefill"

# Queries of one call. torch also computes the scores that a mask hides, so keys behind the last query of a call are left out.
# Measured: a quarter less time for a prompt of 136 tokens, and over a third for one of 512; 32 gains no more.
_MOST_QUERIES = 64


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's queries, first <= token row < last.

    Attributes:
        kv_rows: int64 [2 * T], slots of a layer: all keys, then all values.
        mask: [Q, T], 0 or -inf, the query's dtype; None: plainly causal, Q == T, in one call.
        sinks: bool [Q, sinks], True for first keys that are sinks that a query's window has left; None: none.
    """

    first: int
    last: int
    kv_rows: torch.Tensor
    mask: torch.Tensor | None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The slots that a step's prefill attention reads, for one window; the same for all layers."""

    chunks: tuple[PrefillChunk, ...]
    scratch: Scratch


def plan_prefill(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    kv_layer: torch.Tensor,
    dtype: torch.dtype,
    window: int | None,
    scratch: Scratch | None = None,
    retention: Retention | None = None,
) -> PrefillPlan:
    """Plan gathers and masks for block_tables [S, max_blocks], seq_lens [S], query_start_loc [S + 1]; nothing on CUDA."""
    require_index(_OP, "block_tables", block_tables, 2)
    require_index(_OP, "seq_lens", seq_lens, 1)
    require_index(_OP, "query_start_loc", query_start_loc, 1)
    require_kv_layer(_OP, kv_layer)
    if on_cuda(_OP, seq_lens):
        return PrefillPlan((), scratch or Scratch(seq_lens.device))
    tables, lens = block_tables.numpy().astype(np.int64), seq_lens.numpy().astype(np.int64)
    locs = query_start_loc.numpy().astype(np.int64)
    require_tables(_OP, tables, lens, kv_layer)
    fits = len(locs) == len(lens) + 1 and locs[0] == 0 and bool((np.diff(locs) >= 0).all())
    require(fits, _OP, "query_start_loc", "must rise from 0, with one entry more than there are sequences")
    require(bool((np.diff(locs) <= lens).all()), _OP, "seq_lens", "must count the queries in")
    kept = kept_of(_OP, retention, lens)
    chunks = []
    for index, (first, last) in enumerate(zip(locs[:-1].tolist(), locs[1:].tolist(), strict=True)):
        if first == last:
            continue
        seq_len, num_queries = int(lens[index]), last - first
        if kept is not None and (own := int(kept.windows[index])):
            table = tables[index : index + 1]
            chunks.append(_plan_kept(first, last, table, seq_len, int(kept.sinks[index]), own, kv_layer, dtype))
            continue
        start = 0 if window is None else max(0, seq_len - num_queries - window + 1)
        keys = np.arange(start, seq_len)
        rows = kv_slot_rows(tables[index : index + 1], keys[None], kv_layer)
        mask = None
        if num_queries != len(keys) or num_queries > _MOST_QUERIES or (window is not None and window < seq_len):
            ahead = torch.from_numpy(keys[None] - np.arange(seq_len - num_queries, seq_len)[:, None])
            dead = (ahead > 0) if window is None else (ahead > 0) | (ahead <= -window)
            mask = torch.zeros(dead.shape, dtype=dtype).masked_fill_(dead, -torch.inf)
        chunks.append(PrefillChunk(first, last, rows, mask))
    return PrefillPlan(tuple(chunks), scratch or Scratch())


def _plan_kept(
    first: int, last: int, table: Int64Array, seq_len: int, sink: int, window: int, kv_layer: torch.Tensor, dtype: torch.dtype
) -> PrefillChunk:
    """A sequence whose queries do not see all keys: keys between its sinks and its first query's window are not gathered."""
    queries = np.arange(seq_len - (last - first), seq_len)[:, None]
    start = max(sink, int(queries[0, 0]) - window + 1)
    keys = np.concatenate((np.arange(sink), np.arange(start, seq_len)))
    is_left = keys <= queries - window
    dead = torch.from_numpy((keys > queries) | (is_left & (keys >= sink)))
    mask = torch.zeros(dead.shape, dtype=dtype).masked_fill_(dead, -torch.inf)
    sinks = torch.from_numpy(is_left[:, :sink]) if sink else None
    return PrefillChunk(first, last, kv_slot_rows(table, keys[None], kv_layer), mask, sinks)


def paged_attention_prefill(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    retention: Retention | None = None,
    q_sink: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    plan: PrefillPlan | None = None,
) -> torch.Tensor:
    """Attend every sequence's queries, the last of its tokens, causally to its cached keys and values.

    Args:
        q: [T, num_heads, head_dim], num_heads a multiple of num_kv_heads, the cache's dtype.
        kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim], with the queries' own K and V stored already.
        block_tables: int32 [S, max_blocks]; entries beyond a sequence's length, and between its sinks and its first query's
            window, are not read.
        seq_lens: int32 [S], context and queries.
        query_start_loc: int32 [S + 1]; sequence s has the queries [query_start_loc[s], query_start_loc[s + 1]).
        scale: factor of the scores.
        window: keys visible to a query, itself included; None: all before it.
        soft_cap: bound that the scores are bent towards, see dense_attention; None: none.
        retention: int32 [S] sink_lens and [S] window_lens, as in paged_attention_decode; each query has a window of its own.
        q_sink: like q, the same queries rotated at min(p, sink + window - 1) where q's are at p; with retention.
        sink_logits: float32 [num_heads], see paged_attention_decode; None: none.
        plan: plan_prefill of the same arguments, to share its work over layers.

    Returns:
        [T, num_heads, head_dim]; rows beyond the last sequence's are zero, on CUDA undefined.

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit, or, on a CPU, a table that is too short or leaves the arena.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, q)
    num_kv_heads, head_dim = kv_layer.shape[3:]
    fits = q.dim() == 3 and q.shape[1] % num_kv_heads == 0 and q.shape[2] == head_dim
    require(fits, _OP, "q", "{} does not fit {}", q.shape, kv_layer.shape)
    require(q.dtype == kv_layer.dtype, _OP, "q", "must be {}, is {}", kv_layer.dtype, q.dtype)
    require_retention(_OP, retention, q, q_sink, window)
    require_sink_logits(_OP, sink_logits, q)
    if plan is None:
        plan = plan_prefill(block_tables, seq_lens, query_start_loc, kv_layer, q.dtype, window, retention=retention)
    if cuda:
        from ..gpu import paged_attention_prefill as gpu
        from ..gpu.attention_tiles import Options

        require(block_tables.stride(1) == 1, _OP, "block_tables", "must be contiguous in their last dimension")
        options = Options(scale, window, soft_cap, retention, q_sink, sink_logits)
        return gpu.paged_attention_prefill(q, kv_layer, block_tables, seq_lens, query_start_loc, options)
    covered = plan.chunks[-1].last if plan.chunks else 0
    require(covered <= q.shape[0], _OP, "query_start_loc", "names {} queries of {}", covered, q.shape[0])
    slot_len, group = num_kv_heads * head_dim, q.shape[1] // num_kv_heads
    rows = slot_rows(kv_layer, slot_len)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    head_logits = None if sink_logits is None else sink_logits.view(num_kv_heads, group, 1, 1)
    for chunk in plan.chunks:
        part = slice(chunk.first, chunk.last)
        # Heads of one group share K and V: a stride of zero, not a copy. [num_kv_heads, group, T, head_dim]
        gathered = plan.scratch.take(chunk.kv_rows.numel() * slot_len, q.dtype).view(-1, slot_len)
        torch.index_select(rows, 0, chunk.kv_rows, out=gathered)
        kv = gathered.view(2, -1, num_kv_heads, 1, head_dim).permute(0, 2, 3, 1, 4).expand(-1, -1, group, -1, -1)
        heads = q[part].unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
        heads_sink = None
        if q_sink is not None and chunk.sinks is not None:
            heads_sink = q_sink[part].unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
        for own, num_keys in calls_of(chunk.last - chunk.first, kv.shape[3]):
            attended = dense_attention(
                heads[:, :, own],
                kv[0, :, :, :num_keys],
                kv[1, :, :, :num_keys],
                None if chunk.mask is None else chunk.mask[own, :num_keys],
                is_causal=chunk.mask is None,
                scale=scale,
                soft_cap=soft_cap,
                q_sink=None if heads_sink is None else heads_sink[:, :, own],
                sinks=None if chunk.sinks is None else chunk.sinks[own, :num_keys],
                sink_logits=head_logits,
            )
            out[part][own] = attended.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def calls_of(num_queries: int, num_keys: int) -> Iterator[tuple[slice, int]]:
    """The queries of each call, and the number of leading keys that the call's last query sees."""
    for first in range(0, num_queries, _MOST_QUERIES):
        last = min(first + _MOST_QUERIES, num_queries)
        yield slice(first, last), num_keys - (num_queries - last)
