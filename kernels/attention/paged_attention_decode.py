"""paged_attention_decode: one query per sequence over its block table, with grouped-query heads.

On a CPU, sparse_decode.py computes float32. For other dtypes, the keys and values of a group of sequences are gathered with one
index_select per layer, and torch's fused attention runs on them, the query heads of one KV head as the rows of one small
matrix. The slots to read are the same for all layers and are planned once per step. Sequences of similar length share a group,
because a group is padded to its longest.
"""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..checks import on_cuda, require, require_index, require_kv_layer, require_sink_logits, slot_rows
from ..cpu import compiled
from ..cpu.attention import DirectDecode, direct_decode
from ..layout import NULL_BLOCK_ID
from ..scratch import Scratch
from .dense_attention import dense_attention
from .paged_rows import Int64Array, kv_slot_rows, require_tables
from .retention import Retention, kept_of, require_retention
from .sparse_decode import SparseDecode, sparse_decode

if TYPE_CHECKING:
    from ..gpu.decode_work import DecodeWork

_OP = "paged_attention_decode"

# Measured at 16 to 64 sequences. A further group is three more torch calls in every layer: padding of this many
# elements of K and V costs the same. A group of more than a few megabytes leaves the caches between gather and use.
_PADDING_ELEMENTS = 1 << 17
_GROUP_ELEMENTS = 1 << 20
_MOST_SPARSE_TOKENS = 1 << 17  # of all sequences: the index of a sparse product has an entry for each of them and each head


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """n sequences of similar length, first <= position in DecodePlan.order < last, padded to T tokens.

    Attributes:
        kv_rows: int64 [2 * n * T], slots of a layer: all keys, then all values. Padding repeats the sequence's last
            slot, so that every slot that is read was written before.
        mask: [n, 1, 1, T], 0 or -inf, the query's dtype; None: no padding.
        sinks: bool [n, 1, 1, most sinks], True for first keys that are sinks that the window has left; None: none.
    """

    first: int
    last: int
    kv_rows: torch.Tensor
    mask: torch.Tensor | None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The slots that a step's decode attention reads, for one window; the same for all layers.

    Attributes:
        groups: together they cover every sequence once.
        order, inverse: int64 [S], the sequences by length and back, or None where their order is kept.
        empty: int64 indices of sequences of length 0, whose output is zero, or None.
        scratch: memory to gather into.
        sparse, direct: read instead of groups, which are empty then; None: groups are read.
        work: on CUDA, where there are no groups: which program takes what; None: each sequence has its own.
    """

    groups: tuple[DecodeGroup, ...]
    order: torch.Tensor | None
    inverse: torch.Tensor | None
    empty: torch.Tensor | None
    scratch: Scratch
    sparse: SparseDecode | None = None
    direct: DirectDecode | None = None
    work: "DecodeWork | None" = None


def plan_decode(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_layer: torch.Tensor,
    dtype: torch.dtype,
    window: int | None,
    scratch: Scratch | None = None,
    retention: Retention | None = None,
) -> DecodePlan:
    """Plan the gather for block_tables [S, max_blocks] and seq_lens [S]; `dtype` is the queries'.

    With retention, sequences that do not see all their keys have groups of their own, sinks before window, at no cost to the
    others. On CUDA nothing is gathered: the plan has the work list, which the device makes, and the scratch.
    """
    require_index(_OP, "block_tables", block_tables, 2)
    require_index(_OP, "seq_lens", seq_lens, 1)
    require_kv_layer(_OP, kv_layer)
    if on_cuda(_OP, seq_lens):
        from ..gpu.decode_work import plan_work

        is_latent = kv_layer.stride(1) == 0  # of latent_attention, whose kernel reads each sequence by itself
        work = plan_work(block_tables, seq_lens, kv_layer, window, retention, may_share=not is_latent)
        return DecodePlan((), None, None, None, scratch or Scratch(seq_lens.device), work=work)
    tables, lens = block_tables.numpy().astype(np.int64), seq_lens.numpy().astype(np.int64)
    require_tables(_OP, tables, lens, kv_layer)
    kept = kept_of(_OP, retention, lens)
    if kept is None and dtype is torch.float32 and compiled.serves(kv_layer):
        num_keys = int((lens if window is None else np.minimum(lens, window)).sum())
        direct = DirectDecode(block_tables.int().contiguous(), seq_lens.int().contiguous(), window, num_keys)
        return DecodePlan((), None, None, None, scratch or Scratch(), direct=direct)
    starts = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0)
    spans = lens - starts
    if kept is not None:
        starts = np.where(kept.windows > 0, lens - kept.windows, starts)
        spans = kept.sinks + lens - starts
    if dtype is torch.float32 and spans.sum() <= _MOST_SPARSE_TOKENS:
        own_sinks = kept.sinks if kept is not None and kept.sinks.any() else None
        sparse = SparseDecode(tables, starts, lens, kv_layer, own_sinks)
        return DecodePlan((), None, None, None, scratch or Scratch(), sparse)
    empty = np.flatnonzero(lens == 0)
    if len(empty):  # one slot is read for them and thrown away: let it be the null block's
        tables = np.pad(tables, ((0, 0), (0, 1)))
        tables[empty] = NULL_BLOCK_ID
    slot_elements = 2 * kv_layer.shape[3] * kv_layer.shape[4]
    spans = np.maximum(spans, 1)
    if kept is None:
        order = np.argsort(-spans, kind="stable")
        bounds = _group_bounds(spans[order], slot_elements)
    else:
        order = np.lexsort((-spans, kept.windows > 0))
        num_whole = int(np.count_nonzero(kept.windows == 0))
        bounds = _group_bounds(spans[order[:num_whole]], slot_elements) if num_whole else [0]
        bounds += [num_whole + bound for bound in _group_bounds(spans[order[num_whole:]], slot_elements)[1:]]
    if reordered := len(bounds) > 2:
        inverse = np.argsort(order)
    else:  # one group: no reason to reorder queries and outputs in every layer
        order = np.arange(len(lens))
    groups = []
    for first, last in itertools.pairwise(bounds):
        members = order[first:last]
        steps, last_steps = np.arange(spans[members].max()), spans[members, None] - 1
        places, sinks = np.minimum(steps, last_steps), None
        positions = starts[members, None] + places
        if kept is not None and (num_sinks := int(kept.sinks[members].max())):
            own = kept.sinks[members, None]
            positions = np.where(places < own, places, positions - own)
            sinks = torch.from_numpy(steps[:num_sinks] < own)[:, None, None]
        dead = torch.from_numpy(steps > last_steps)
        mask = torch.zeros(dead.shape, dtype=dtype).masked_fill_(dead, -torch.inf)[:, None, None] if dead.any() else None
        groups.append(DecodeGroup(first, last, kv_slot_rows(tables[members], positions, kv_layer), mask, sinks))
    return DecodePlan(
        groups=tuple(groups),
        order=torch.from_numpy(order) if reordered else None,
        inverse=torch.from_numpy(inverse) if reordered else None,
        empty=torch.from_numpy(empty) if len(empty) else None,
        scratch=scratch or Scratch(),
    )


def paged_attention_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    retention: Retention | None = None,
    q_sink: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """Attend one query per sequence, the last of its tokens, to the sequence's cached keys and values.

    Args:
        q: [S, num_heads, head_dim], num_heads a multiple of num_kv_heads, the cache's dtype.
        kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim], one layer's view of the arena.
        block_tables: int32 [S, max_blocks]; entries beyond a sequence's length, and between its sinks and its window, are not
            read.
        seq_lens: int32 [S], the query's token included; 0 gives a row of zeros.
        scale: factor of the scores.
        window: keys visible to the query, itself included; None: all.
        soft_cap: bound that the scores are bent towards, see dense_attention; None: none.
        retention: int32 [S] sink_lens and [S] window_lens, window 0: the sequence keeps everything; retention.py tells the keys
            that a query sees. Not together with window. None: all sequences keep everything.
        q_sink: like q, the same queries rotated at min(p, sink + window - 1) where q's are at p; with retention.
        sink_logits: float32 [num_heads], scores of one more key of each head, which has no value (gpt-oss, arXiv 2508.10925);
            None: there is none. Not to be confused with the sinks of retention, which are tokens.
        plan: plan_decode of the same tables, lengths, window and retention, to share its work over layers.

    Returns:
        [S, num_heads, head_dim].

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit, or, on a CPU, a table that is too short or leaves the arena.
        UnsupportedDeviceError: neither on a CPU nor on CUDA.
    """
    cuda = on_cuda(_OP, q)
    num_kv_heads, head_dim = kv_layer.shape[3:]
    fits = q.dim() == 3 and q.shape[0] == seq_lens.shape[0] and q.shape[1] % num_kv_heads == 0
    require(fits and q.shape[2] == head_dim, _OP, "q", "{} does not fit {}", q.shape, kv_layer.shape)
    require(q.dtype == kv_layer.dtype, _OP, "q", "must be {}, is {}", kv_layer.dtype, q.dtype)
    require_retention(_OP, retention, q, q_sink, window)
    require_sink_logits(_OP, sink_logits, q)
    if plan is None:
        plan = plan_decode(block_tables, seq_lens, kv_layer, q.dtype, window, retention=retention)
    if cuda:
        from ..gpu import paged_attention_decode as gpu
        from ..gpu.attention_tiles import Options

        require(block_tables.stride(1) == 1, _OP, "block_tables", "must be contiguous in their last dimension")
        options = Options(scale, window, soft_cap, retention, q_sink, sink_logits)
        return gpu.paged_attention_decode(q, kv_layer, block_tables, seq_lens, options, plan.scratch, plan.work)
    if plan.direct is not None:
        q = q if q.stride()[1:] == (head_dim, 1) else q.contiguous()
        return direct_decode(q, kv_layer, plan.direct, scale=scale, soft_cap=soft_cap, sink_logits=sink_logits)
    if plan.sparse is not None:
        return sparse_decode(q, kv_layer, plan.sparse, scale=scale, soft_cap=soft_cap, q_sink=q_sink, sink_logits=sink_logits)
    if plan.order is not None:
        q = q.index_select(0, plan.order)
        q_sink = None if q_sink is None else q_sink.index_select(0, plan.order)
    slot_len = num_kv_heads * head_dim
    rows = slot_rows(kv_layer, slot_len)
    grouped = q.unflatten(1, (num_kv_heads, -1))  # [S, num_kv_heads, group, head_dim]
    grouped_sink = None if q_sink is None else q_sink.unflatten(1, (num_kv_heads, -1))
    head_logits = None if sink_logits is None else sink_logits.view(num_kv_heads, -1, 1)
    outs = []
    for group in plan.groups:
        gathered = plan.scratch.take(group.kv_rows.numel() * slot_len, q.dtype).view(-1, slot_len)
        torch.index_select(rows, 0, group.kv_rows, out=gathered)
        kv = gathered.view(2, group.last - group.first, -1, num_kv_heads, head_dim).transpose(2, 3)
        part = slice(group.first, group.last)
        outs.append(
            dense_attention(
                grouped[part],
                kv[0],
                kv[1],
                group.mask,
                is_causal=False,
                scale=scale,
                soft_cap=soft_cap,
                q_sink=None if grouped_sink is None else grouped_sink[part],
                sinks=group.sinks,
                sink_logits=head_logits,
            )
        )
    out = (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1, 2)
    if plan.inverse is not None:
        out = out.index_select(0, plan.inverse)
    return out if plan.empty is None else out.index_fill_(0, plan.empty, 0)


def _group_bounds(spans: Int64Array, slot_elements: int) -> list[int]:
    """Cut spans, longest first, where a group would grow too large or pad too much: beyond the allowance, and beyond
    an eighth of its use.
    """
    most_padding, most_tokens = _PADDING_ELEMENTS // slot_elements, _GROUP_ELEMENTS // slot_elements
    bounds, first, used = [0], 0, 0
    for index, span in enumerate(spans.tolist()):
        used += span
        padded = (index + 1 - first) * int(spans[first])
        if index > first and (padded > most_tokens or padded - used > max(most_padding, used // 8)):
            bounds.append(index)
            first, used = index, span
    bounds.append(len(spans))
    return bounds
