"""Attention of one step: which rows decode, which prefill, and what both need, worked out once for all layers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch

from kvkeeper.kernels.attention.flashinfer_prefill import FlashInferPlan
from kvkeeper.kernels.attention.latent_attention import latent_layer
from kvkeeper.kernels.attention.paged_attention_decode import DecodePlan, paged_attention_decode, plan_decode
from kvkeeper.kernels.attention.paged_attention_prefill import paged_attention_prefill, plan_prefill
from kvkeeper.kernels.attention.paged_rows import GatherPlan
from kvkeeper.kernels.attention.retention import Retention
from kvkeeper.kernels.cpu.attention import DirectPrefill
from kvkeeper.kernels.scratch import Scratch
from kvkeeper.kernels.store_kv import StorePlan, plan_store, store_kv

from ..values.batch import Batch, BatchRetention, IntArray
from .chunked import decode_in_chunks, prefill_in_chunks
from .layer_groups import LayerGroup, find_places
from .recurrent.state_pages import StateMetadata

# Rows among a step's tokens: int64 [n], or those of a slice; None: all, in order.
TokenRows = torch.Tensor | slice | None
PrefillPlan = GatherPlan | DirectPrefill | FlashInferPlan


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The sequences with one query. token_rows: of their S_d tokens."""

    token_rows: TokenRows
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    plans: Mapping[int | None, DecodePlan]
    retention: Retention | None


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The sequences with several queries. token_rows: of their T_p tokens; plans by window."""

    token_rows: TokenRows
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


@dataclass(frozen=True, slots=True)
class StepAttention:
    """What attention needs by part of the layers, and of each layer its part and its place in a block.

    views: of each part its blocks [num_blocks, layers of a block, 2, block_size, num_kv_heads, head_dim].
    states: by group, what recurrent layers need instead.
    """

    groups: tuple[AttentionMetadata, ...]
    places: tuple[tuple[int, int], ...]
    views: tuple[torch.Tensor, ...]
    states: Mapping[int, StateMetadata] = field(default_factory=dict)

    @property
    def sink_positions(self) -> torch.Tensor | None:
        return self.groups[0].sink_positions

    def of_layer(self, layer: int) -> tuple[AttentionMetadata, torch.Tensor]:
        """The metadata, and the layer's view of the arena."""
        group, at = self.places[layer]
        return self.groups[group], self.views[group][:, at]

    def get_states(self, layer: int) -> tuple[StateMetadata, int]:
        """The metadata of a recurrent layer, and the layer's index in its group's pages."""
        group, at = self.places[layer]
        return self.states[group], at


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Layers that read the same part of a sequence. table: the group whose table they have. chunk: None where they read all."""

    table: int
    windows: tuple[int | None, ...]
    chunk: int | None = None


def attention_parts(
    groups: Sequence[LayerGroup],
    windows: Sequence[int | None],
    chunks: Sequence[int | None] = (),
    reads: Sequence[int] = (),
) -> tuple[tuple[AttentionPart, ...], tuple[tuple[int, int], ...]]:
    """The parts of a model's layers, and of each layer its part and its place in the blocks of that part's table.

    One for each group of layers that attend, which come first; without groups one for all layers, and one more for each size of
    chunks.
    reads: see ModelConfig.
    """
    parts, places = _own_parts(groups, windows, chunks)
    return parts, tuple(places[number] for number in reads) if reads else places


def _own_parts(
    groups: Sequence[LayerGroup], windows: Sequence[int | None], chunks: Sequence[int | None]
) -> tuple[tuple[AttentionPart, ...], tuple[tuple[int, int], ...]]:
    """The same, without layers that store nothing."""
    if groups:
        attending = (group for group in groups if not group.is_recurrent)
        kinds = ((None, group.window) if group.is_chunked else (group.window, None) for group in attending)
        return tuple(AttentionPart(at, (window,), chunk) for at, (window, chunk) in enumerate(kinds)), find_places(groups)
    sizes = [None, *sorted({chunk for chunk in chunks if chunk})]
    of_layers = [sizes.index(chunk) for chunk in chunks] if chunks else [0] * len(windows)
    parts = tuple(AttentionPart(0, tuple(windows), size) for size in sizes)
    return parts, tuple((part, layer) for layer, part in enumerate(of_layers))


def attention_arrays(
    batch: Batch, parts: Sequence[AttentionPart] = (), block_size: int = 1, states: Collection[int] = ()
) -> dict[str, IntArray]:
    """What a step's attention has to know of its batch, split into rows that decode and rows that prefill.

    To go to the model's device together, and from there to build_attention_metadata. block_size matters to parts with chunks.
    states: numbers of the groups whose tables no layer attends by.
    """
    query_lens = np.diff(batch.query_start_loc)
    ones, several = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
    arrays: dict[str, IntArray] = {"slot_mapping": batch.slot_mapping}
    for part, rows in (("decode", ones), ("prefill", several)):
        if len(rows):
            arrays[f"{part}_tables"], arrays[f"{part}_lens"] = batch.block_tables[rows], batch.seq_lens[rows]
            if batch.retention is not None and batch.retention.window_lens[rows].any():
                arrays[f"{part}_sinks"] = batch.retention.sink_lens[rows]
                arrays[f"{part}_windows"] = batch.retention.window_lens[rows]
    if len(several):
        arrays["prefill_locs"] = np.concatenate(([0], np.cumsum(query_lens[several]))).astype(np.int32)
    if len(ones) and len(several) and (states or ones[-1] > several[0]):  # else each part is a slice
        arrays["decode_tokens"] = batch.query_start_loc[ones].astype(np.int64)
        arrays["prefill_tokens"] = np.flatnonzero(np.repeat(query_lens > 1, query_lens)).astype(np.int64)
    if batch.retention is not None:
        arrays["sink_positions"] = _sink_positions(batch, batch.retention)
    if batch.group_tables is not None and batch.group_slots is not None:
        for group, slots in enumerate(batch.group_slots, 1):
            if group in states:
                continue
            arrays[f"slot_mapping_{group}"] = slots
            for part, rows in (("decode", ones), ("prefill", several)):
                if len(rows):
                    arrays[f"{part}_tables_{group}"] = np.ascontiguousarray(batch.group_tables[rows, group - 1])
    if len(several):
        for index, each in enumerate(parts):
            if each.chunk is not None:
                tables = arrays.get(f"prefill_tables_{each.table}", arrays["prefill_tables"])
                cut = prefill_in_chunks(tables, batch.seq_lens[several], query_lens[several], each.chunk, block_size)
                arrays |= {f"prefill_{name}_{index}": of_rows for name, of_rows in zip(_OF_ROWS, cut, strict=True)}
    return arrays


_OF_ROWS = ("tables", "lens", "locs")
_BY_PART = ("slot_mapping", "decode_tables", *(f"prefill_{name}" for name in _OF_ROWS))


def build_step_attention(
    tensors: Mapping[str, torch.Tensor],
    views: tuple[torch.Tensor, ...],
    parts: Sequence[AttentionPart],
    places: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    scratch: Scratch,
    prompts: Mapping[tuple[int, int | None], FlashInferPlan] = MappingProxyType({}),
) -> StepAttention:
    """As build_attention_metadata, for each of attention_parts.

    A batch without tables of groups, as before the first step, has the first group's for all.
    views: of each part its blocks, see StepAttention.
    prompts: by number of the part and window, where prefill is planned already.
    """
    found = []
    for at, part in enumerate(parts):
        own = {name: tensors[f"{name}_{at}"] for name in _BY_PART if f"{name}_{at}" in tensors}
        of_part = {**tensors, **own}
        if part.chunk is not None and "decode_lens" in of_part:
            tables, lens = of_part["decode_tables"], of_part["decode_lens"]
            of_part["decode_tables"], of_part["decode_lens"] = decode_in_chunks(tables, lens, part.chunk, views[at].shape[3])
        layer = views[at][:, 0] if views[at].shape[2] == 2 else latent_layer(views[at][:, 0])
        planned = {window: plan for (number, window), plan in prompts.items() if number == at}
        found.append(build_attention_metadata(of_part, layer, part.windows, dtype, scratch, planned))
    return StepAttention(tuple(found), places, views)


def _sink_positions(batch: Batch, retention: BatchRetention) -> IntArray:
    """The last place among the tokens that are kept, once there are more than those."""
    sinks, windows = retention.sink_lens.astype(np.int64), retention.window_lens
    last_places = np.where(windows > 0, sinks + windows - 1, np.iinfo(np.int64).max)
    return np.minimum(batch.positions, np.repeat(last_places, np.diff(batch.query_start_loc)))


def build_attention_metadata(
    tensors: Mapping[str, torch.Tensor],
    kv_layer: torch.Tensor,
    windows: Iterable[int | None],
    dtype: torch.dtype,
    scratch: Scratch,
    planned: Mapping[int | None, FlashInferPlan] = MappingProxyType({}),
) -> AttentionMetadata:
    """Plan decode and prefill for every window that occurs in the model.

    Args:
        tensors: of attention_arrays, on the device of kv_layer.
        kv_layer: any layer's view of the arena; only its shape and strides are used.
        dtype: of the queries.
        scratch: memory that the step's attention may use.
        planned: plans of prefill that there are already, by window.
    """
    distinct = set(windows)
    decode, prefill = None, None
    if "decode_lens" in tensors:
        tables, lens, kept = tensors["decode_tables"], tensors["decode_lens"], _retention(tensors, "decode")
        decode_plans = {window: plan_decode(tables, lens, kv_layer, dtype, window, scratch, kept) for window in distinct}
        decode = DecodeRows(token_rows(tensors, "decode"), tables, lens, decode_plans, kept)
    if "prefill_lens" in tensors:
        tables, lens, kept = tensors["prefill_tables"], tensors["prefill_lens"], _retention(tensors, "prefill")
        locs = tensors["prefill_locs"]
        prefill_plans = {
            window: planned.get(window) or plan_prefill(tables, lens, locs, kv_layer, dtype, window, scratch, kept)
            for window in distinct
        }
        prefill = PrefillRows(token_rows(tensors, "prefill"), tables, lens, locs, prefill_plans, kept)
    store = plan_store(tensors["slot_mapping"], kv_layer)
    return AttentionMetadata(tensors["slot_mapping"], store, decode, prefill, tensors.get("sink_positions"))


def token_rows(tensors: Mapping[str, torch.Tensor], part: Literal["decode", "prefill"]) -> TokenRows:
    """Where the tokens of the rows that decode, or that prefill, are. tensors: of attention_arrays.

    Rows that decode come first where it is not said otherwise.
    """
    if not {"decode_lens", "prefill_lens"} <= tensors.keys():
        return None
    if f"{part}_tokens" in tensors:
        return tensors[f"{part}_tokens"]
    num_decodes = len(tensors["decode_lens"])
    return slice(num_decodes) if part == "decode" else slice(num_decodes, None)


def _retention(tensors: Mapping[str, torch.Tensor], part: str) -> Retention | None:
    return (tensors[f"{part}_sinks"], tensors[f"{part}_windows"]) if f"{part}_sinks" in tensors else None


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
    return attend_stored(q, kv_layer, metadata, scale, window, soft_cap, q_sink)


def attend_stored(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    q_sink: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same, where the step's K and V of the layer are in the arena already. sink_logits: see paged_attention_decode."""

    def attend_rows(rows: DecodeRows | PrefillRows) -> torch.Tensor:
        options: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "soft_cap": soft_cap,
            "retention": rows.retention,
            "q_sink": None if q_sink is None or rows.retention is None else pick(q_sink, rows.token_rows),
            "sink_logits": sink_logits,
            "plan": rows.plans[window],
        }
        args = (pick(q, rows.token_rows), kv_layer, rows.block_tables, rows.seq_lens)
        if isinstance(rows, PrefillRows):
            return paged_attention_prefill(*args, rows.query_start_loc, **options)
        return paged_attention_decode(*args, **options)

    parts = (rows for rows in (metadata.decode, metadata.prefill) if rows is not None)
    return join_parts(len(q), [(rows.token_rows, attend_rows(rows)) for rows in parts])


def pick(of_step: torch.Tensor, token_rows: TokenRows) -> torch.Tensor:
    """Some rows of a step's tokens; None: all."""
    return of_step if token_rows is None else of_step[token_rows]


def join_parts(num_tokens: int, parts: Sequence[tuple[TokenRows, torch.Tensor]]) -> torch.Tensor:
    """The step's rows in order, of what was computed of rows that decode and of rows that prefill, each with its token_rows."""
    if len(parts) == 1:
        return parts[0][1]
    if isinstance(parts[0][0], slice):
        return torch.cat([computed for _, computed in parts])
    out = parts[0][1].new_empty((num_tokens, *parts[0][1].shape[1:]))
    for rows, computed in parts:
        assert isinstance(rows, torch.Tensor), "two parts share the step's rows"
        out.index_copy_(0, rows, computed)
    return out
