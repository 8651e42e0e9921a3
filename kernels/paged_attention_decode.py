"""paged_attention_decode: one query per sequence over its block table, with grouped-query heads.

The CPU path gathers every key and value of a group of sequences with one index_select per layer, head by head, so
that what follows is two dense batched products without a copy. Which rows to gather is the same for all layers and
is planned once per step. Sequences of similar length share a group, because a group is padded to its longest.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from kernels.checks import require, require_cpu, require_index, require_kv_layer, slot_rows
from kernels.layout import NULL_BLOCK_ID

_OP = "paged_attention_decode"

# A group may gather this many elements of K (and of V) in vain before a further group, that is four more torch calls
# in every layer, is cheaper; measured at 16 to 64 sequences on two cores.
_PADDING_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of similar length, first <= position in DecodePlan.order < last.

    Attributes:
        kv_rows: int64 [2 * n * num_kv_heads * T], head-sized rows of a layer: all keys, then all values. Padding
            repeats the sequence's last slot, so that nothing is read that was never written.
        mask: [n * num_kv_heads, 1, T], 0 or -inf, the query's dtype.
    """

    first: int
    last: int
    kv_rows: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What a step's decode attention reads, for one window; the same for all layers.

    Attributes:
        groups: together they cover every sequence once.
        order, inverse: int64 [S], the sequences by length and back, or None when they are taken as they come.
        empty: int64 indices of sequences of length 0, whose output is zero, or None.
    """

    groups: tuple[DecodeGroup, ...]
    order: torch.Tensor | None
    inverse: torch.Tensor | None
    empty: torch.Tensor | None


def plan_decode(
    block_tables: torch.Tensor, seq_lens: torch.Tensor, kv_layer: torch.Tensor, dtype: torch.dtype, window: int | None
) -> DecodePlan:
    """Plan the gather for block_tables [S, max_blocks] and seq_lens [S]; `dtype` is the queries'."""
    require_index(_OP, "block_tables", block_tables, 2)
    require_index(_OP, "seq_lens", seq_lens, 1)
    require_kv_layer(_OP, kv_layer)
    tables, lens = block_tables.numpy().astype(np.int64), seq_lens.numpy().astype(np.int64)
    require_tables(_OP, tables, lens, kv_layer)
    starts = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0)
    spans = np.maximum(lens - starts, 1)
    empty = np.flatnonzero(lens == 0)
    if len(empty):  # their first slot is read below and thrown away: let it be the null block's
        tables = (
            np.where(lens[:, None] > 0, tables, NULL_BLOCK_ID)
            if tables.shape[1]
            else np.zeros((len(lens), 1), np.int64)
        )
    order = np.argsort(-spans, kind="stable")
    bounds = _group_bounds(spans[order], _PADDING_ELEMENTS // (kv_layer.shape[3] * kv_layer.shape[4]))
    if len(bounds) == 2:  # one group: no reason to reorder queries and outputs in every layer
        order = np.arange(len(lens))
    groups = []
    for first, last in itertools.pairwise(bounds):
        members = order[first:last]
        steps = np.arange(spans[members].max())
        positions = starts[members, None] + np.minimum(steps, spans[members, None] - 1)
        rows = kv_head_rows(tables[members], positions, kv_layer)
        dead = torch.from_numpy(steps >= spans[members, None]).repeat_interleave(kv_layer.shape[3], dim=0)
        mask = torch.zeros(dead.shape, dtype=dtype).masked_fill_(dead, -torch.inf).unsqueeze(1)
        groups.append(DecodeGroup(first, last, rows, mask))
    reordered = len(groups) > 1
    return DecodePlan(
        groups=tuple(groups),
        order=torch.from_numpy(order) if reordered else None,
        inverse=torch.from_numpy(np.argsort(order)) if reordered else None,
        empty=torch.from_numpy(empty) if len(empty) else None,
    )


def paged_attention_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """Attend one query per sequence, the last of its tokens, to the sequence's cached keys and values.

    Args:
        q: [S, num_heads, head_dim], num_heads a multiple of num_kv_heads, the cache's dtype.
        kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim], one layer's view of the arena.
        block_tables: int32 [S, max_blocks]; entries beyond a sequence's length are not read.
        seq_lens: int32 [S], the query's token included; 0 gives a row of zeros.
        scale: factor of the scores.
        window: keys visible to the query, itself included; None: all.
        plan: plan_decode of the same tables, lengths and window, to share its work over layers.

    Returns:
        [S, num_heads, head_dim].

    Raises:
        KernelArgumentError: shapes or dtypes that do not fit, or a table that is too short or leaves the arena.
        UnsupportedDeviceError: not on a CPU.
    """
    require_cpu(_OP, q)
    num_kv_heads, head_dim = kv_layer.shape[3:]
    fits = q.dim() == 3 and q.shape[0] == seq_lens.shape[0] and q.shape[1] % num_kv_heads == 0
    require(fits and q.shape[2] == head_dim, _OP, "q", "{} does not fit {}", q.shape, kv_layer.shape)
    require(q.dtype == kv_layer.dtype, _OP, "q", "must be {}, is {}", kv_layer.dtype, q.dtype)
    if plan is None:
        plan = plan_decode(block_tables, seq_lens, kv_layer, q.dtype, window)
    if plan.order is not None:
        q = q.index_select(0, plan.order)
    rows = slot_rows(kv_layer, head_dim)
    grouped = q.reshape(q.shape[0] * num_kv_heads, -1, head_dim)  # [S * num_kv_heads, group, head_dim]
    out = torch.empty_like(grouped)
    for group in plan.groups:
        part = slice(group.first * num_kv_heads, group.last * num_kv_heads)
        kv = rows.index_select(0, group.kv_rows).view(2, *group.mask.shape[::2], head_dim)
        if q.dtype is torch.float32:
            scores = torch.baddbmm(group.mask, grouped[part], kv[0].transpose(1, 2), alpha=scale)
            torch.bmm(torch.softmax(scores, dim=-1), kv[1], out=out[part])
        else:  # scores kept in 16 bits would lose what the fused op's float32 inside keeps
            mask = group.mask.expand(-1, grouped.shape[1], -1)
            out[part] = torch.nn.functional.scaled_dot_product_attention(
                grouped[None, part], kv[:1], kv[1:], attn_mask=mask[None], scale=scale
            )[0]
    out = out.view(q.shape)
    if plan.inverse is not None:
        out = out.index_select(0, plan.inverse)
    return out if plan.empty is None else out.index_fill_(0, plan.empty, 0)


def require_tables(op: str, tables: np.ndarray, lens: np.ndarray, kv_layer: torch.Tensor) -> None:
    """Raise unless every table is long enough for its sequence and names only blocks of the arena."""
    num_blocks, _, block_size = kv_layer.shape[:3]
    used = -(-lens // block_size)
    fits = tables.shape[0] == lens.shape[0] and int(used.max(initial=0)) <= tables.shape[1]
    require(fits, op, "block_tables", "{} are too short for the sequences", tables.shape)
    named = np.where(np.arange(tables.shape[1]) < used[:, None], tables, 0)
    inside = named.min(initial=0) >= 0 and named.max(initial=0) < num_blocks
    require(bool(inside), op, "block_tables", "name blocks outside the arena of {}", num_blocks)


def kv_head_rows(tables: np.ndarray, positions: np.ndarray, kv_layer: torch.Tensor) -> torch.Tensor:
    """Rows of slot_rows(kv_layer, head_dim) for token positions [n, T] of sequences with tables [n, max_blocks].

    Returns:
        int64 [2 * n * num_kv_heads * T]: all keys, then all values, sequence by sequence, head by head.
    """
    _, _, block_size, num_kv_heads, head_dim = kv_layer.shape
    blocks = np.take_along_axis(tables, positions // block_size, axis=1)
    slots = blocks * (kv_layer.stride(0) // head_dim) + positions % block_size * num_kv_heads
    rows = np.empty((2, positions.shape[0], num_kv_heads, positions.shape[1]), dtype=np.int64)
    np.add(slots[:, None, :], np.arange(num_kv_heads)[:, None], out=rows[0])
    np.add(rows[0], kv_layer.stride(1) // head_dim, out=rows[1])
    return torch.from_numpy(rows.reshape(-1))


def _group_bounds(spans: np.ndarray, allowance: int) -> list[int]:
    """Cut spans, longest first, where a group's padding would exceed `allowance` tokens and an eighth of its use."""
    bounds, first, used = [0], 0, 0
    for index, span in enumerate(spans.tolist()):
        used += span
        padding = (index + 1 - first) * int(spans[first]) - used
        if padding > max(allowance, used // 8):
            bounds.append(index)
            first, used = index, span
    bounds.append(len(spans))
    return bounds
