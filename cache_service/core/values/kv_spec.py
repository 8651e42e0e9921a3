"""The KV spec: the facts two sessions must have in common to share K and V, what its layers read, and the bytes of a block.

Owns the arithmetic of full attention, sliding windows and chunks (ReadSpan), which differ in the first token that is read and
in nothing else: what is before it is given back, and a hit does without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from .types import Int32Array, Int64Array

_SCALE_BYTES: Final = 2
_ALIGNMENT: Final = 16  # of blocks with scales
_Positions = TypeVar("_Positions", Int32Array, Int64Array)


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A token reads the num_tokens up to itself, or those of its chunk of so many; 0: all before it."""

    num_tokens: int = 0
    is_chunk: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all tokens are read, so that nothing is ever left behind."""
        return not self.num_tokens

    def firsts(self, positions: _Positions) -> _Positions:
        """[n] the first tokens that those at these positions [n] read."""
        if self.is_whole:
            return np.zeros_like(positions)
        if self.is_chunk:
            return positions // self.num_tokens * self.num_tokens
        return np.maximum(positions - self.num_tokens + 1, 0)

    def first(self, position: int) -> int:
        """The same of one position."""
        if self.is_chunk:
            return position // self.num_tokens * self.num_tokens
        return max(position - self.num_tokens + 1, 0) if self.num_tokens else 0

    def least_position(self, first: int) -> int:
        """The first position that reads nothing before token `first`. Not of a whole span."""
        if self.is_chunk:
            return -(-first // self.num_tokens) * self.num_tokens
        return first + self.num_tokens - 1 if first else 0

    def most_blocks(self, block_size: int) -> int:
        """Most blocks that are held of a sequence that grows by one token at a time. Not of a whole span."""
        return (self.num_tokens - 1) // block_size + 2


WHOLE = ReadSpan()


def spans_of(*windows: int) -> tuple[ReadSpan, ...]:
    """Of groups with these windows in tokens, 0 for all."""
    return tuple(ReadSpan(window) for window in windows)


def first_reads(spans: Sequence[ReadSpan], positions: _Positions) -> _Positions:
    """[n, groups] the first token that each position [n] reads in each group. Groups mostly have one or two spans."""
    found = {span: span.firsts(positions) for span in dict.fromkeys(spans)}
    return np.stack([found[span] for span in spans], 1)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose K and V of a token lie in one block. window: tokens that each token reads, itself included; 0: all.

    is_chunked: instead it reads those of its chunk of so many tokens.

    is_tail: a second, finer copy of the newest tokens, which hits do without. tail_item_bytes: of an element of it.
    """

    layers: tuple[int, ...]
    window: int
    is_tail: bool = False
    tail_item_bytes: int = 0
    is_chunked: bool = False

    @property
    def span(self) -> ReadSpan:
        """What a token reads in these layers."""
        return ReadSpan(self.window, self.is_chunked)


@dataclass(frozen=True, slots=True)
class KvSpec:
    """The parts of a KV spec that this service counts with, and all of it as `key`.

    key is equal exactly for specs that may share K and V, fields of newer clients included. A spec has layers, heads, elements
    and their bytes, or else page_bytes alone: then a block is an opaque page, and the other four are 0. With groups a block
    has the layers of one group, and the bytes of the largest.

    With several ranks all that is told of heads, elements and bytes is of each rank alone: each has its share of every block in
    an arena of its own, under the same number.
    """

    key: bytes
    model_id: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    item_bytes: int  # of one element of K or V
    block_size: int
    page_bytes: int = 0
    groups: tuple[LayerGroup, ...] = ()  # empty: one block has all layers
    num_ranks: int = 1
    scaled_bits: int = 0  # of an element of K or V where a head of a token has a scale; 0: elements of item_bytes

    @property
    def is_opaque(self) -> bool:
        """Whether only the clients know where in a block K and V are."""
        return self.page_bytes > 0

    @property
    def token_bytes(self) -> int:
        """Bytes of K, or of V, of one token in one layer. Not of opaque pages."""
        assert not self.is_opaque, "calls that need rows of K and V refuse opaque pages"
        if self.scaled_bits:
            return self.num_kv_heads * (self.head_dim * self.scaled_bits // 8 + _SCALE_BYTES)
        return self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all its layers, K and V."""
        if self.scaled_bits:
            element = self.num_kv_heads * self.head_dim
            tail = max((len(group.layers) * element * group.tail_item_bytes for group in self.groups), default=0)
            return -(-2 * self.block_size * max(tail, self.num_layers * self.token_bytes) // _ALIGNMENT) * _ALIGNMENT
        return self.page_bytes or self.layers_per_block * 2 * self.block_size * self.token_bytes

    def place_of(self, layer_idx: int) -> tuple[int, int]:
        """The group of a layer, and its place among the layers in a block of that group."""
        for group_idx, group in enumerate(self.groups):
            if layer_idx in group.layers:
                return group_idx, group.layers.index(layer_idx)
        return 0, layer_idx

    @property
    def stored_bytes(self) -> int:
        """Bytes of one block below the device: the shares of all ranks, one behind the other."""
        return self.num_ranks * self.block_bytes

    @property
    def layers_per_block(self) -> int:
        return max((len(group.layers) for group in self.groups), default=self.num_layers)
