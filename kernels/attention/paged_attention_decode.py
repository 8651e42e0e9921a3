"""paged_attention_decode: one query per sequence over its block table, with grouped-query heads.

On a CPU the compiled kernel reads keys and values in place. Where it does not serve, they are gathered, as for a prefill of one
query each (gathered.py).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..checks import on_cuda, require, require_index, require_kv_layer, require_sink_logits
from ..cpu.attention import DirectDecode, can_attend, direct_decode
from ..scratch import Scratch
from ..types import Int64Array
from .gathered import attend_gathered, plan_sequences
from .paged_rows import GatherPlan, plan_gather, require_tables
from .retention import Kept, Retention, find_kept, require_retention

if TYPE_CHECKING:
    from ..gpu.decode_work import DecodeWork

_OP = "paged_attention_decode"


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What a step's decode attention reads, for one window; the same for all layers.

    Attributes:
        scratch: memory that the op may use.
        read: on a CPU the tables as the compiled kernel reads them, or the slots to gather; None on CUDA.
        work: on CUDA, which program takes what; None: each sequence has its own.
    """

    scratch: Scratch
    read: DirectDecode | GatherPlan | None = None
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
    """Plan decode for block_tables [S, max_blocks] and seq_lens [S]; `dtype` is the queries'.

    On CUDA the plan has the work list, which the device makes, and the scratch.
    """
    require_index(_OP, "block_tables", block_tables, 2)
    require_index(_OP, "seq_lens", seq_lens, 1)
    require_kv_layer(_OP, kv_layer)
    if on_cuda(_OP, seq_lens):
        from ..gpu.decode_work import plan_work, tile_tokens

        is_latent = kv_layer.stride(1) == 0  # of latent_attention, whose kernel reads each sequence by itself
        tile = tile_tokens(kv_layer.shape[4])
        work = plan_work(block_tables, seq_lens, kv_layer, window, retention, tile, may_share=not is_latent)
        return DecodePlan(scratch or Scratch(seq_lens.device), work=work)
    tables, lens = block_tables.numpy().astype(np.int64), seq_lens.numpy().astype(np.int64)
    require_tables(_OP, tables, lens, kv_layer)
    kept, scratch = find_kept(_OP, retention, lens), scratch or Scratch()
    if dtype is kv_layer.dtype and can_attend(kv_layer):
        return DecodePlan(scratch, _plan_direct(block_tables, seq_lens, lens, window, kept))
    sequences = plan_sequences(lens, np.arange(len(lens) + 1), dtype, window, kept)
    return DecodePlan(scratch, plan_gather(sequences, tables, kv_layer, scratch))


def _plan_direct(
    block_tables: torch.Tensor, seq_lens: torch.Tensor, lens: Int64Array, window: int | None, kept: Kept | None
) -> DirectDecode:
    starts = np.zeros(len(lens), np.int64) if window is None else np.maximum(lens - window, 0)
    sinks = np.zeros(len(lens), np.int64)
    if kept is not None:
        starts, sinks = np.where(kept.windows > 0, lens - kept.windows, starts), kept.sinks
    columns = torch.from_numpy(np.stack((starts, sinks)).astype(np.int32))
    num_keys = int((lens - starts + sinks).sum())
    return DirectDecode(block_tables.int().contiguous(), seq_lens.int().contiguous(), columns[0], columns[1], num_keys)


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
        retention: int32 [S] sink_lens and [S] window_lens, window 0: the sequence keeps everything; retention.py says which
            keys a query sees. Not together with window. None: all sequences keep everything.
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
    if isinstance(plan.read, DirectDecode):
        return direct_decode(q, kv_layer, plan.read, scale=scale, soft_cap=soft_cap, q_sink=q_sink, sink_logits=sink_logits)
    assert plan.read is not None, "planned on a CPU"
    return attend_gathered(
        q,
        plan.read.read(kv_layer),
        num_kv_heads,
        scale=scale,
        value_size=head_dim,
        soft_cap=soft_cap,
        q_sink=q_sink,
        sink_logits=sink_logits,
    )
