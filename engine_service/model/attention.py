"""Attention of one step: which rows decode, which prefill, and what both need, worked out once for all layers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from engine_service.batch import Batch, IntArray
from kernels.paged_attention_decode import DecodePlan, paged_attention_decode, plan_decode
from kernels.paged_attention_prefill import PrefillPlan, paged_attention_prefill, plan_prefill
from kernels.retention import Retention
from kernels.scratch import Scratch
from kernels.store_kv import StorePlan, plan_store, store_kv


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The sequences with one query. token_rows [S_d] are their rows among the step's tokens; None: all, in order."""

    token_rows: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    plans: Mapping[int | None, DecodePlan]
    retention: Retention | None


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The sequences with several queries. token_rows [T_p] as in DecodeRows; plans by window."""

    token_rows: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    plans: Mapping[int | None, PrefillPlan]
    retention: Retention | None


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Built once per step and shared by all layers.

    sink_positions: int64 [T], where each token's query stands for sinks that its window has left; None: no row has such.
    """

    slot_mapping: torch.Tensor
    store: StorePlan
    decode: DecodeRows | None
    prefill: PrefillRows | None
    sink_positions: torch.Tensor | None


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
        kept = _retention(batch, ones)
        decode_plans = {window: plan_decode(tables, lens, kv_layer, dtype, window, scratch, kept) for window in distinct}
        decode = DecodeRows(decode_tokens, tables, lens, decode_plans, kept)
    if len(several):
        prefill_tokens = _index(np.flatnonzero(np.repeat(query_lens > 1, query_lens))) if len(ones) else None
        tables, lens = torch.from_numpy(batch.block_tables[several]), torch.from_numpy(batch.seq_lens[several])
        locs = torch.from_numpy(np.concatenate(([0], np.cumsum(query_lens[several]))).astype(np.int32))
        kept = _retention(batch, several)
        prefill_plans = {
            window: plan_prefill(tables, lens, locs, kv_layer, dtype, window, scratch, kept) for window in distinct
        }
        prefill = PrefillRows(prefill_tokens, tables, lens, locs, prefill_plans, kept)
    return AttentionMetadata(slot_mapping, plan_store(slot_mapping, kv_layer), decode, prefill, _sink_positions(batch))


def _retention(batch: Batch, rows: IntArray) -> Retention | None:
    if batch.retention is None or not batch.retention.window_lens[rows].any():
        return None
    return torch.from_numpy(batch.retention.sink_lens[rows]), torch.from_numpy(batch.retention.window_lens[rows])


def _sink_positions(batch: Batch) -> torch.Tensor | None:
    """The last place among the tokens that are kept, once there are more than those."""
    if batch.retention is None:
        return None
    sinks, windows = batch.retention.sink_lens.astype(np.int64), batch.retention.window_lens
    last_places = np.repeat(np.where(windows > 0, sinks + windows - 1, np.iinfo(np.int64).max), np.diff(batch.query_start_loc))
    return torch.from_numpy(np.minimum(batch.positions, last_places))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    q_sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store k and v [T, num_kv_heads, head_dim], then attend q [T, num_heads, head_dim] through the block tables.

    q_sink: the queries rotated at metadata.sink_positions, where there are such.

    Returns:
        [T, num_heads, head_dim].
    """
    store_kv(k, v, kv_layer, metadata.slot_mapping, metadata.store)
    decode, prefill = metadata.decode, metadata.prefill
    if prefill is None:
        assert decode is not None, "a batch has tokens"
        return _decode(q, kv_layer, decode, scale, window, soft_cap, q_sink)
    if decode is None:
        return _prefill(q, kv_layer, prefill, scale, window, soft_cap, q_sink)
    assert decode.token_rows is not None
    assert prefill.token_rows is not None
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    decode_sink = q_sink[decode.token_rows] if q_sink is not None and decode.retention is not None else None
    prefill_sink = q_sink[prefill.token_rows] if q_sink is not None and prefill.retention is not None else None
    decoded = _decode(q[decode.token_rows], kv_layer, decode, scale, window, soft_cap, decode_sink)
    prefilled = _prefill(q[prefill.token_rows], kv_layer, prefill, scale, window, soft_cap, prefill_sink)
    return out.index_copy_(0, decode.token_rows, decoded).index_copy_(0, prefill.token_rows, prefilled)


def _decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    rows: DecodeRows,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    q_sink: torch.Tensor | None,
) -> torch.Tensor:
    return paged_attention_decode(
        q,
        kv_layer,
        rows.block_tables,
        rows.seq_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        retention=rows.retention,
        q_sink=q_sink,
        plan=rows.plans[window],
    )


def _prefill(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    rows: PrefillRows,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    q_sink: torch.Tensor | None,
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
        retention=rows.retention,
        q_sink=q_sink,
        plan=rows.plans[window],
    )


def _index(rows: IntArray) -> torch.Tensor:
    return torch.from_numpy(rows.astype(np.int64))
