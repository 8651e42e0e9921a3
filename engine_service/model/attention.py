"""Attention of one step: which rows decode, which prefill, and what both need, worked out once for all layers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from engine_service.batch import Batch, IntArray
from kernels.paged_attention_decode import DecodePlan, paged_attention_decode, plan_decode
from kernels.paged_attention_prefill import PrefillPlan, paged_attention_prefill, plan_prefill
from kernels.scratch import Scratch
from kernels.store_kv import StorePlan, plan_store, store_kv


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The sequences with one query. token_rows [S_d] are their rows among the step's tokens; None: all, in order."""

    token_rows: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    plans: Mapping[int | None, DecodePlan]


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The sequences with several queries. token_rows [T_p] as in DecodeRows; plans by window."""

    token_rows: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    plans: Mapping[int | None, PrefillPlan]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Built once per step and shared by all layers."""

    slot_mapping: torch.Tensor
    store: StorePlan
    decode: DecodeRows | None
    prefill: PrefillRows | None


def build_attention_metadata(
    batch: Batch, kv_layer: torch.Tensor, windows: Iterable[int | None], dtype: torch.dtype, scratch: Scratch
) -> AttentionMetadata:
    """Split a batch into decode and prefill, and plan both for every window that occurs in the model.

    Args:
        kv_layer: any layer's view of the arena; only its shape and strides are used.
        dtype: of the queries.
        scratch: memory that the step's attention may use.
    """
    slot_mapping = torch.from_numpy(batch.slot_mapping)
    query_lens = np.diff(batch.query_start_loc)
    ones, several = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
    distinct = set(windows)
    decode, prefill = None, None
    if len(ones):
        decode_tokens = _index(batch.query_start_loc[ones]) if len(several) else None
        tables, lens = torch.from_numpy(batch.block_tables[ones]), torch.from_numpy(batch.seq_lens[ones])
        decode_plans = {window: plan_decode(tables, lens, kv_layer, dtype, window, scratch) for window in distinct}
        decode = DecodeRows(decode_tokens, tables, lens, decode_plans)
    if len(several):
        prefill_tokens = _index(np.flatnonzero(np.repeat(query_lens > 1, query_lens))) if len(ones) else None
        tables, lens = torch.from_numpy(batch.block_tables[several]), torch.from_numpy(batch.seq_lens[several])
        locs = torch.from_numpy(np.concatenate(([0], np.cumsum(query_lens[several]))).astype(np.int32))
        prefill_plans = {window: plan_prefill(tables, lens, locs, kv_layer, dtype, window, scratch) for window in distinct}
        prefill = PrefillRows(prefill_tokens, tables, lens, locs, prefill_plans)
    return AttentionMetadata(slot_mapping, plan_store(slot_mapping, kv_layer), decode, prefill)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Store k and v [T, num_kv_heads, head_dim], then attend q [T, num_heads, head_dim] through the block tables.

    Returns:
        [T, num_heads, head_dim].
    """
    store_kv(k, v, kv_layer, metadata.slot_mapping, metadata.store)
    decode, prefill = metadata.decode, metadata.prefill
    if prefill is None:
        assert decode is not None, "a batch has tokens"
        return _decode(q, kv_layer, decode, scale, window, soft_cap)
    if decode is None:
        return _prefill(q, kv_layer, prefill, scale, window, soft_cap)
    assert decode.token_rows is not None
    assert prefill.token_rows is not None
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    decoded = _decode(q[decode.token_rows], kv_layer, decode, scale, window, soft_cap)
    prefilled = _prefill(q[prefill.token_rows], kv_layer, prefill, scale, window, soft_cap)
    return out.index_copy_(0, decode.token_rows, decoded).index_copy_(0, prefill.token_rows, prefilled)


def _decode(
    q: torch.Tensor, kv_layer: torch.Tensor, rows: DecodeRows, scale: float, window: int | None, soft_cap: float | None
) -> torch.Tensor:
    plan = rows.plans[window]
    return paged_attention_decode(
        q, kv_layer, rows.block_tables, rows.seq_lens, scale=scale, window=window, soft_cap=soft_cap, plan=plan
    )


def _prefill(
    q: torch.Tensor, kv_layer: torch.Tensor, rows: PrefillRows, scale: float, window: int | None, soft_cap: float | None
) -> torch.Tensor:
    return paged_attention_prefill(
        q,
        kv_layer,
        rows.block_tables,
        rows.seq_lens,
        rows.query_start_loc,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        plan=rows.plans[window],
    )


def _index(rows: IntArray) -> torch.Tensor:
    return torch.from_numpy(rows.astype(np.int64))
