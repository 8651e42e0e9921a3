"""Attention of one step over K and V that are stored in another format than they are computed in, with or without a tail.

The counterpart of attention.py, which has the choice of rows that decode and rows that prefill. Owns what a step's tail is:
the tables and slots of the groups of layers behind the first. A tail's table has 0 where a block is read as it is stored, and
a token whose entry is 0 is not written to the tail. A batch without tables of groups, as before the first step, has an empty
tail.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from kvkeeper.kernels.quantised.attention import plan_rows, quantised_decode, quantised_prefill
from kvkeeper.kernels.quantised.layout import QuantisedLayer, QuantisedLayout
from kvkeeper.kernels.quantised.store import plan_slots
from kvkeeper.kernels.types import QuantisedRows, QuantisedSlots

from .attention import TokenRows, join_parts, pick, token_rows

MOST_TAILS = 12  # groups of layers: each has a table of every sequence, which a step has to handle
_USUAL_TOKENS = 4096  # of a sequence that the tail's groups are cut for


class Options(TypedDict):
    """The options of both ways of attention, as paged_attention_decode takes them."""

    scale: float
    window: int | None
    soft_cap: float | None
    sink_logits: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class StoredMetadata:
    """What one layer's attention needs in a step. token_rows as in attention.DecodeRows; sink_positions: never any."""

    layer: QuantisedLayer
    slots: QuantisedSlots
    decode: QuantisedRows | None
    prefill: QuantisedRows | None
    decode_tokens: TokenRows
    prefill_tokens: TokenRows


@dataclass(frozen=True, slots=True)
class StoredAttention:
    """The metadata of all layers, in the place of attention.StepAttention."""

    layers: tuple[StoredMetadata, ...]
    sink_positions: None = None

    def of_layer(self, layer: int) -> tuple[StoredMetadata, None]:
        """The metadata, which has the layer's view of the arena in it."""
        return self.layers[layer], None


def count_tail_layers(layout: QuantisedLayout, tail_tokens: int) -> int:
    """How many layers a page of the tail has, so that a sequence of usual length takes the fewest bytes; 0 without a tail.

    layout: without a tail.
    """
    if not tail_tokens:
        return 0
    size, stored = layout.block_size, layout.block_bytes
    page = 2 * size * layout.num_kv_heads * layout.head_dim * layout.dtype.itemsize
    num_blocks, num_pages = -(-_USUAL_TOKENS // size), -(-tail_tokens // size)

    def cost(count: int) -> tuple[int, int]:
        num_groups = -(-layout.num_layers // count)
        return max(stored, count * page) * (num_blocks + num_groups * num_pages), num_groups

    fewest = -(-layout.num_layers // MOST_TAILS)
    return min(range(fewest, layout.num_layers + 1), key=cost)


def build_stored_attention(tensors: Mapping[str, torch.Tensor], layers: Sequence[QuantisedLayer]) -> StoredAttention:
    """Plan a step. tensors: of attention.attention_arrays, on the device; layers: all of the model's, on its arena."""
    layout = layers[0].layout
    num_tails = -(-layout.num_layers // layout.tail_layers) if layout.tail_layers else 0
    planned = [_plan(tensors, layers[0], None)] if not num_tails else []
    planned += [_plan(tensors, layers[0], group) for group in range(1, num_tails + 1)]
    found = []
    of_rows = token_rows(tensors, "decode"), token_rows(tensors, "prefill")
    for index, layer in enumerate(layers):
        found.append(StoredMetadata(layer, *planned[index // layout.tail_layers if num_tails else 0], *of_rows))
    return StoredAttention(tuple(found))


def _plan(
    tensors: Mapping[str, torch.Tensor], layer: QuantisedLayer, group: int | None
) -> tuple[QuantisedSlots, QuantisedRows | None, QuantisedRows | None]:
    """Slots and rows, with the tail's of a group."""
    slots, tail_slots = tensors["slot_mapping"], None
    if group is not None:
        tail_slots = tensors.get(f"slot_mapping_{group}")
        none = torch.full_like(slots, -1)
        # The null block holds no token: a slot in it stands for an entry that the tail lacks.
        tail_slots = none if tail_slots is None else torch.where(tail_slots < layer.layout.block_size, none, tail_slots)
    rows: list[QuantisedRows | None] = []
    for part in ("decode", "prefill"):
        if f"{part}_lens" not in tensors:
            rows.append(None)
            continue
        tables, pages = tensors[f"{part}_tables"], None
        if group is not None:
            pages = tensors.get(f"{part}_tables_{group}")
            pages = torch.zeros_like(tables) if pages is None else pages
        locs = tensors["prefill_locs"] if part == "prefill" else None
        rows.append(plan_rows(tables, pages, tensors[f"{part}_lens"], locs, layer))
    return plan_slots(slots, tail_slots, layer), rows[0], rows[1]


def attend_as_stored(
    q: torch.Tensor,
    metadata: StoredMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q [T, num_heads, head_dim] where the step's K and V of the layer are in the arena already.

    sink_logits: see paged_attention_decode.
    """
    layer, parts = metadata.layer, []
    options: Options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sink_logits": sink_logits}
    if metadata.decode is not None:
        own = pick(q, metadata.decode_tokens)
        parts.append((metadata.decode_tokens, quantised_decode(own, layer, metadata.decode, **options)))
    if metadata.prefill is not None:
        own = pick(q, metadata.prefill_tokens)
        parts.append((metadata.prefill_tokens, quantised_prefill(own, layer, metadata.prefill, **options)))
    return join_parts(len(q), parts)
