"""Attention with torch, sequence by sequence, over keys and values that are gathered first.

What computes on a CPU where no compiled kernel does: decode and prefill, of numbers, of latents, and of stored K and V. Which
keys the queries of a sequence see is the same for all layers, and is planned once per step.
"""

import itertools
from collections.abc import Iterable

import numpy as np
import torch

from ..checks import require
from ..types import Int64Array, SequenceQueries
from .retention import Kept


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    soft_cap: float | None,
    q_sink: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """[..., Q, D] of q [..., Q, D], k and v [..., T, D]; mask is added to the scores, broadcast to [..., Q, T].

    soft_cap: scores s become soft_cap * tanh(s / soft_cap) (Gemma 2, arXiv 2408.00118); None: torch's fused attention.
    sinks: bool, broadcast to [..., Q, number of first keys]: True for keys that are scored with q_sink [..., Q, D] instead of q
        (see retention.py); None: none.
    sink_logits: broadcast to [..., Q, 1], the score of one more key, which has no value; None: there is none.
    """
    if soft_cap is None and sinks is None and sink_logits is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    scores = q @ k.transpose(-2, -1)
    if sinks is not None:
        assert q_sink is not None, "sinks come with the query that scores them"
        part = slice(sinks.shape[-1])
        scores[..., part] = torch.where(sinks, q_sink @ k[..., part, :].transpose(-2, -1), scores[..., part])
    scores = scores.mul_(scale) if soft_cap is None else scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1), -torch.inf)
    if mask is not None:
        scores = scores + mask
    if sink_logits is not None:
        scores = torch.cat((scores, sink_logits.expand(*scores.shape[:-1], 1).to(scores.dtype)), -1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights if sink_logits is None else weights[..., :-1]) @ v


Gathered = tuple[SequenceQueries, torch.Tensor, torch.Tensor]  # with keys and values, [T, num_kv_heads, size of each]

# Queries of one call. torch also computes the scores that a mask hides, so keys behind the last query of a call are left out.
# Measured: a quarter less time for a prompt of 136 tokens, and over a third for one of 512; 32 gains no more.
_MOST_QUERIES = 64


def require_starts(op: str, locs: Int64Array, lens: Int64Array) -> None:
    """Raise KernelArgumentError unless locs [S + 1] rise from 0, and each of the sequences has as many tokens as queries."""
    fits = len(locs) == len(lens) + 1 and locs[0] == 0 and bool((np.diff(locs) >= 0).all())
    require(fits, op, "query_start_loc", "must rise from 0, with one entry more than there are sequences")
    require(bool((np.diff(locs) <= lens).all()), op, "seq_lens", "must count the queries in")


def plan_sequences(
    lens: Int64Array, locs: Int64Array, dtype: torch.dtype, window: int | None, kept: Kept | None = None
) -> tuple[SequenceQueries, ...]:
    """What sequences of lens [S] tokens, with the queries [locs[s], locs[s + 1]), see; none of those without either."""
    planned = []
    for seq, (first, last) in enumerate(itertools.pairwise(locs.tolist())):
        if first < last and lens[seq]:
            sink, own_window = 0, window
            if kept is not None and kept.windows[seq]:
                sink, own_window = int(kept.sinks[seq]), int(kept.windows[seq])
            planned.append(_plan(seq, first, last, int(lens[seq]), sink, own_window, dtype))
    return tuple(planned)


def _plan(seq: int, first: int, last: int, seq_len: int, sink: int, window: int | None, dtype: torch.dtype) -> SequenceQueries:
    """Keys between the sinks and the first query's window are not gathered."""
    num_queries = last - first
    start = 0 if window is None else max(sink, seq_len - num_queries - window + 1)
    positions = np.arange(start, seq_len)
    if sink:
        positions = np.concatenate((np.arange(sink), positions))
    queries = np.arange(seq_len - num_queries, seq_len)[:, None]
    sinks = torch.from_numpy(positions[:sink] <= queries - window) if sink and window is not None else None
    is_causal = num_queries == len(positions) and num_queries <= _MOST_QUERIES and (window is None or window >= seq_len)
    if num_queries == 1 or is_causal:
        return SequenceQueries(seq, first, last, positions, None, sinks)
    dead = positions > queries
    if window is not None:
        dead |= (positions <= queries - window) & (positions >= sink)
    mask = torch.zeros(dead.shape, dtype=dtype).masked_fill_(torch.from_numpy(dead), -torch.inf)
    return SequenceQueries(seq, first, last, positions, mask, sinks)


def attend_gathered(
    q: torch.Tensor,
    gathered: Iterable[Gathered],
    num_kv_heads: int,
    *,
    scale: float,
    value_size: int,
    soft_cap: float | None = None,
    q_sink: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q [T, num_heads, key size]; see paged_attention_prefill for the options. Rows of no sequence are zero.

    gathered: keys and values of a sequence are read before those of the next are asked for.

    Returns:
        [T, num_heads, value_size].
    """
    out = q.new_zeros((*q.shape[:2], value_size))
    # [T, num_kv_heads, group, size] each
    grouped, grouped_out = q.unflatten(1, (num_kv_heads, -1)), out.unflatten(1, (num_kv_heads, -1))
    grouped_sink = None if q_sink is None else q_sink.unflatten(1, (num_kv_heads, -1))
    logits = None if sink_logits is None else sink_logits.view(num_kv_heads, -1, 1)
    for each, keys, values in gathered:
        rows, k, v = slice(each.first, each.last), keys.transpose(0, 1), values.transpose(0, 1)
        sunk = None if grouped_sink is None or each.sinks is None else grouped_sink[rows]
        if each.last - each.first == 1:  # the heads of a group are the rows of one matrix
            grouped_out[rows] = dense_attention(
                grouped[rows],
                k[None],
                v[None],
                None,
                is_causal=False,
                scale=scale,
                soft_cap=soft_cap,
                q_sink=sunk,
                sinks=each.sinks,
                sink_logits=logits,
            )
        else:
            _attend_several(grouped[rows], k, v, each, grouped_out[rows], scale, soft_cap, sunk, logits)
    return out


def _attend_several(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    each: SequenceQueries,
    out: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    q_sink: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
) -> None:
    """Write out [Q, num_kv_heads, group, size] of queries q, like it, and k and v [num_kv_heads, T, size]."""
    num_queries, group = q.shape[0], q.shape[2]
    k, v = (side[:, None].expand(-1, group, -1, -1) for side in (k, v))  # a stride of zero, not a copy
    for first in range(0, num_queries, _MOST_QUERIES):
        last = min(first + _MOST_QUERIES, num_queries)
        num_keys = k.shape[2] - (num_queries - last)  # that the call's last query sees
        attended = dense_attention(
            q[first:last].permute(1, 2, 0, 3),
            k[:, :, :num_keys],
            v[:, :, :num_keys],
            None if each.mask is None else each.mask[first:last, :num_keys],
            is_causal=each.mask is None,
            scale=scale,
            soft_cap=soft_cap,
            q_sink=None if q_sink is None else q_sink[first:last].permute(1, 2, 0, 3),
            sinks=None if each.sinks is None else each.sinks[first:last, :num_keys],
            sink_logits=None if sink_logits is None else sink_logits[..., None],
        )
        out[first:last] = attended.permute(2, 0, 1, 3)
