"""Paged attention, compiled: keys and values are read where they are, block by block."""

from dataclasses import dataclass

import torch

from . import compiled
from .launch import Launcher

_decode = Launcher("attend_decode", "q" * 17 + "ddqq")
_prefill = Launcher("attend_prefill", "q" * 17 + "dd")
_ALL_KEYS = 1 << 62


def can_attend(kv_layer: torch.Tensor) -> bool:
    """Whether the kernels read the K and V of this layer: heads take whole steps of four bytes (tiles.py)."""
    return compiled.serves(kv_layer) and kv_layer.shape[-1] * kv_layer.itemsize % 4 == 0


@dataclass(frozen=True, slots=True)
class DirectDecode:
    """What the kernel reads, proved to stay in the arena.

    Sequence s sees its tokens [0, sinks[s]) and [starts[s], seq_lens[s]).

    Attributes:
        block_tables: int32 [S, max_blocks].
        seq_lens, starts, sinks: int32 [S], contiguous.
        num_keys: that all queries see together.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    sinks: torch.Tensor
    num_keys: int


def direct_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: DirectDecode,
    *,
    scale: float,
    soft_cap: float | None,
    q_sink: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q [S, num_heads, head_dim] as paged_attention_decode does. A sequence that sees nothing gets zeros."""
    num_seqs, num_heads, size = q.shape
    _, _, block_size, num_kv_heads, _ = kv_layer.shape
    q = _with_whole_rows(q)
    q_sink = q if q_sink is None else _with_whole_rows(q_sink)
    out = torch.empty(q.shape, dtype=q.dtype)
    of_queries = q.data_ptr(), q.stride(0), q_sink.data_ptr(), q_sink.stride(0)
    of_layer = kv_layer.data_ptr(), kv_layer.stride(0), kv_layer.stride(1)
    tables, columns = plan.block_tables, (plan.seq_lens, plan.starts, plan.sinks)
    of_rows = tables.data_ptr(), tables.stride(0), *(column.data_ptr() for column in columns)
    shape = num_seqs, num_heads, num_kv_heads, size, block_size
    ends = out.data_ptr(), 0 if sink_logits is None else sink_logits.data_ptr()
    work = plan.num_keys * num_heads * size
    _decode(q.dtype, work, *of_queries, *of_layer, *of_rows, *shape, float(scale), float(soft_cap or 0), *ends)
    return out


@dataclass(frozen=True, slots=True)
class DirectPrefill:
    """What the kernel reads, proved to stay in the arena; each sequence has as many tokens as queries at least.

    Attributes:
        block_tables: int32 [S, max_blocks].
        seq_lens, query_start_loc: int32 [S] and [S + 1], contiguous.
        window: keys that a query sees; None: all before it.
        num_keys: that all queries see together, about.
        num_queries: of all sequences.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    window: int | None
    num_keys: int
    num_queries: int


def direct_prefill(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: DirectPrefill,
    *,
    scale: float,
    soft_cap: float | None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q [T, num_heads, head_dim] as paged_attention_prefill does."""
    _, num_heads, size = q.shape
    _, _, block_size, num_kv_heads, _ = kv_layer.shape
    q = _with_whole_rows(q)
    out = torch.empty(q.shape, dtype=q.dtype)
    out[plan.num_queries :].zero_()
    of_layer = kv_layer.data_ptr(), kv_layer.stride(0), kv_layer.stride(1)
    tables, num_seqs = plan.block_tables, len(plan.seq_lens)
    of_rows = tables.data_ptr(), tables.stride(0), plan.seq_lens.data_ptr(), plan.query_start_loc.data_ptr()
    shape = num_seqs, num_heads, num_kv_heads, size, block_size, plan.window or _ALL_KEYS
    ends = out.data_ptr(), 0 if sink_logits is None else sink_logits.data_ptr()
    numbers, work = (float(scale), float(soft_cap or 0)), plan.num_keys * num_heads * size
    _prefill(q.dtype, work, q.data_ptr(), q.stride(0), *of_layer, *of_rows, *shape, *ends, *numbers)
    return out


def _with_whole_rows(q: torch.Tensor) -> torch.Tensor:
    """q, with the heads of a row behind each other."""
    return q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()
