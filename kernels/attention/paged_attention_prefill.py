"""paged_attention_prefill: several queries per sequence (ragged), causal, over a cached prefix and their own keys."""

import numpy as np
import torch

from ..checks import on_cuda, require, require_index, require_kv_layer, require_sink_logits
from ..cpu.attention import DirectPrefill, can_attend, direct_prefill
from ..scratch import Scratch
from .flashinfer_prefill import FlashInferPlan
from .gathered import attend_gathered, plan_sequences, require_starts
from .paged_rows import GatherPlan, plan_gather, require_tables
from .retention import Retention, find_kept, require_retention

_OP = "paged_attention_prefill"


def plan_prefill(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    kv_layer: torch.Tensor,
    dtype: torch.dtype,
    window: int | None,
    scratch: Scratch | None = None,
    retention: Retention | None = None,
) -> GatherPlan | DirectPrefill:
    """Plan block_tables [S, max_blocks], seq_lens [S], query_start_loc [S + 1]; nothing on CUDA.

    On a CPU the compiled kernel reads keys and values in place; where it does not serve, and where a sequence has sink and
    window, gathers and masks are planned.
    """
    require_index(_OP, "block_tables", block_tables, 2)
    require_index(_OP, "seq_lens", seq_lens, 1)
    require_index(_OP, "query_start_loc", query_start_loc, 1)
    require_kv_layer(_OP, kv_layer)
    if on_cuda(_OP, seq_lens):
        return GatherPlan((), (), scratch or Scratch(seq_lens.device))
    tables, lens = block_tables.numpy().astype(np.int64), seq_lens.numpy().astype(np.int64)
    locs = query_start_loc.numpy().astype(np.int64)
    require_tables(_OP, tables, lens, kv_layer)
    require_starts(_OP, locs, lens)
    is_latent = kv_layer.stride(1) == 0  # of latent_attention, which makes keys and values of what is gathered
    if retention is None and not is_latent and dtype is kv_layer.dtype and can_attend(kv_layer):
        starts, num_queries = np.maximum(lens - (window or lens), 0), int(locs[-1])
        num_keys = int(((lens - starts) * np.diff(locs)).sum())
        of_rows = block_tables.int().contiguous(), seq_lens.int().contiguous(), query_start_loc.int().contiguous()
        return DirectPrefill(*of_rows, window, num_keys, num_queries)
    sequences = plan_sequences(lens, locs, dtype, window, find_kept(_OP, retention, lens))
    return plan_gather(sequences, tables, kv_layer, scratch or Scratch())


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
    plan: GatherPlan | DirectPrefill | FlashInferPlan | None = None,
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
        plan: plan_prefill of the same arguments, to share its work over layers; or FlashInfer's, which knows no retention and
            no sink_logits.

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
    if isinstance(plan, FlashInferPlan):
        require(retention is None and sink_logits is None, _OP, "plan", "knows no sinks")
        return plan.attend(q, kv_layer, scale, soft_cap)
    if cuda:
        from ..gpu import paged_attention_prefill as gpu
        from ..gpu.attention_tiles import Options

        require(block_tables.stride(1) == 1, _OP, "block_tables", "must be contiguous in their last dimension")
        options = Options(scale, window, soft_cap, retention, q_sink, sink_logits)
        return gpu.paged_attention_prefill(q, kv_layer, block_tables, seq_lens, query_start_loc, options)
    if isinstance(plan, DirectPrefill):
        require(plan.num_queries <= q.shape[0], _OP, "query_start_loc", "names {} queries of {}", plan.num_queries, q.shape[0])
        return direct_prefill(q, kv_layer, plan, scale=scale, soft_cap=soft_cap, sink_logits=sink_logits)
    assert isinstance(plan, GatherPlan), "planned on a CPU"
    covered = plan.sequences[-1].last if plan.sequences else 0
    require(covered <= q.shape[0], _OP, "query_start_loc", "names {} queries of {}", covered, q.shape[0])
    return attend_gathered(
        q,
        plan.read(kv_layer),
        num_kv_heads,
        scale=scale,
        value_size=head_dim,
        soft_cap=soft_cap,
        q_sink=q_sink,
        sink_logits=sink_logits,
    )
