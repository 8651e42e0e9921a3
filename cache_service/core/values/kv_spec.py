"""The KV spec: the facts two sessions must have in common to share K and V, what its layers read, and the bytes of a block.

Owns the arithmetic of full attention, sliding windows and chunks (ReadSpan), which differ in the first token that is read and
in nothing else: what is before it is given back, and a hit does without it. A group of states reads as a window of two tokens
does, the entry of the token before; of what is before it the checkpoints are kept (new_entries.py). And the block names that
clients see, which begin with the spec and by which independent programs compare what they have cached: a name is a chained
SHA-256, over the parent's name and the tokens, as the protocol's comment on WatchEventsResponse.block_names says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import gcd
from typing import Final, NamedTuple, TypeVar

import numpy as np

from .types import Int32Array, Int64Array

BLOCK_NAME_BYTES: Final = 32
_SCALE_BYTES: Final = 2
ALIGNMENT: Final = 16  # of blocks with scales, and of those beside pages
HOST_BITS: Final = {"fp8": 8, "int8": 8, "int4": 4}  # of an element below the device, by the name of its format
_Positions = TypeVar("_Positions", Int32Array, Int64Array)


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A token reads the num_tokens up to itself, or those of its chunk of so many; 0: all before it.

    checkpoint_blocks: each so many-th entry of a group of states is kept; 0: the group has K and V of each token.
    """

    num_tokens: int = 0
    is_chunk: bool = False
    checkpoint_blocks: int = 0

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

    def most_blocks(self, num_entries: int, block_size: int) -> int:
        """Most blocks that are held of a sequence of so many entries that grows by one token at a time."""
        if self.is_whole:
            return num_entries
        if self.checkpoint_blocks:
            return min(num_entries, num_entries // self.checkpoint_blocks + 2)
        return min(num_entries, (self.num_tokens - 1) // block_size + 2)


WHOLE = ReadSpan()


def state_span(checkpoint_blocks: int) -> ReadSpan:
    """The span of a group of states, of which every checkpoint_blocks-th is kept."""
    return ReadSpan(2, checkpoint_blocks=checkpoint_blocks)


def first_reads(spans: Sequence[ReadSpan], positions: _Positions) -> _Positions:
    """[n, groups] the first token that each position [n] reads in each group. Groups mostly have one or two spans."""
    found = {span: span.firsts(positions) for span in dict.fromkeys(spans)}
    return np.stack([found[span] for span in spans], 1)


class Heads(NamedTuple):
    """The shape of K, or of V, of one token in one layer."""

    num_kv_heads: int
    head_dim: int

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * self.head_dim


class HostSides(NamedTuple):
    """How a block is divided below the device where it is kept in few bits: each head of a side has a scale."""

    num_sides: int
    num_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose K and V of a token lie in one block. window: tokens that each token reads, itself included; 0: all.

    is_chunked: instead it reads those of its chunk of so many tokens.

    is_tail: a second, finer copy of the newest tokens, which hits do without. tail_item_bytes, tail_type: of an element of it,
    the latter as KvSpec.element_type.

    state_bytes: of the states of these layers behind one token, which a block has instead of K and V, and of which each
    checkpoint_blocks-th is kept; 0: no states.

    num_kv_heads, head_dim: of its layers, where they are others than the spec's; else both are 0. page_bytes: of a block, where
    only the clients can read it; else 0.
    """

    layers: tuple[int, ...]
    window: int
    is_tail: bool = False
    tail_item_bytes: int = 0
    tail_type: str = ""
    is_chunked: bool = False
    state_bytes: int = 0
    checkpoint_blocks: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    page_bytes: int = 0

    @property
    def has_states(self) -> bool:
        return self.state_bytes > 0

    @property
    def has_rows(self) -> bool:
        """Whether it has K and V whose places in a block are known."""
        return not (self.state_bytes or self.page_bytes)

    @property
    def span(self) -> ReadSpan:
        """What a token reads in these layers."""
        return state_span(self.checkpoint_blocks) if self.has_states else ReadSpan(self.window, self.is_chunked)


@dataclass(frozen=True, slots=True)
class KvSpec:
    """The parts of a KV spec that this service counts with, and all of it as `key`.

    key is equal exactly for specs that may share K and V, fields of newer clients included. A spec has layers, heads, elements
    and their bytes, or else page_bytes alone: then a block is an opaque page, and the other four are 0. With groups a block
    has the layers of one group, with that group's heads or as its page, and the bytes of the largest of these; states are no
    larger. Heads, elements and their bytes are 0 where no group has such.

    With several ranks the numbers of heads, elements and bytes are those of each rank alone: each has its share of every block
    in an arena of its own, under the same number.

    host_kv_dtype is none of the facts: it is how this service keeps blocks below the device, and differs from run to run.
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
    element_type: str = ""  # of K and V: float16, bfloat16 or float32; with scales fp8, int8 or int4; of opaque pages empty
    host_kv_dtype: str = ""  # a format of HOST_BITS; empty: blocks are the same bytes in all tiers

    @property
    def is_opaque(self) -> bool:
        """Whether only the clients know where in a block K and V are."""
        return self.page_bytes > 0

    def layer_heads(self, layer_idx: int) -> Heads:
        """The heads of a layer."""
        return next((self._group_heads(group) for group in self.groups if layer_idx in group.layers), self._heads)

    def token_bytes(self, layer_idx: int) -> int:
        """Bytes of K, or of V, of one token in one layer. Not of opaque pages."""
        assert not self.is_opaque, "calls that need rows of K and V refuse opaque pages"
        heads = self.layer_heads(layer_idx)
        if self.scaled_bits:
            return heads.num_kv_heads * (heads.head_dim * self.scaled_bits // 8 + _SCALE_BYTES)
        return heads.num_elements * self.item_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all its layers, K and V."""
        if self.scaled_bits:
            element = self.num_kv_heads * self.head_dim
            tail = max((len(group.layers) * element * group.tail_item_bytes for group in self.groups), default=0)
            return -(-2 * self.block_size * max(tail, self.num_layers * self.token_bytes(0)) // ALIGNMENT) * ALIGNMENT
        num_bytes, pages = self._num_elements * self.item_bytes, [group.page_bytes for group in self.groups]
        if any(pages):  # which are aligned
            num_bytes = -(-max(num_bytes, *pages) // ALIGNMENT) * ALIGNMENT
        return self.page_bytes or num_bytes

    @property
    def has_states(self) -> bool:
        """Whether layers have states instead of K and V, in blocks that only the clients can read."""
        return any(group.has_states for group in self.groups)

    def has_rows(self, layer_idx: int) -> bool:
        """Whether a layer has K and V whose places in a block are known."""
        return not self.is_opaque and all(group.has_rows for group in self.groups if layer_idx in group.layers)

    def is_recurrent(self, layer_idx: int) -> bool:
        """Whether a layer has a state instead of K and V."""
        return any(layer_idx in group.layers for group in self.groups if group.has_states)

    def find_place(self, layer_idx: int) -> tuple[int, int]:
        """The group of a layer, and its place among the layers in a block of that group."""
        for group_idx, group in enumerate(self.groups):
            if layer_idx in group.layers:
                return group_idx, group.layers.index(layer_idx)
        return 0, layer_idx

    def stored_as(self, host_kv_dtype: str) -> "KvSpec":
        """The same with blocks below the device in this format; as they are, where they are none of numbers without scales.

        So are heads whose length (HostSides.head_dim) the format cannot hold, or so short that with their scales they take no
        fewer bytes, specs of a time that did not name the type of an element, and pools some of whose blocks are states or
        opaque pages.
        """
        bits = HOST_BITS.get(host_kv_dtype, 0)
        are_numbers = self.element_type and not self.scaled_bits and all(group.has_rows for group in self.groups)
        fits = bits and are_numbers and self.host_sides.head_dim % (16 // bits) == 0
        stored = replace(self, host_kv_dtype=host_kv_dtype if fits else "")
        return stored if stored.host_block_bytes < self.block_bytes else replace(self, host_kv_dtype="")

    @property
    def stored_key(self) -> bytes:
        """What blocks below the device must have in common to be found: the key, and the format that they are kept in."""
        if not self.host_kv_dtype:
            return self.key
        heads = f" heads of {self.host_sides.head_dim}" if self._has_own_heads else ""
        return self.key + f"\0host {self.host_kv_dtype}{heads}".encode()

    @property
    def host_block_bytes(self) -> int:
        """Bytes of one block of one rank below the device.

        In few bits it is host_sides, each the elements [num_heads, head_dim] and behind them their scales [num_heads], as in
        KV_LAYOUT_SCALED.
        """
        if not self.host_kv_dtype:
            return self.block_bytes
        num_sides, num_heads, head_dim = self.host_sides
        head_bytes = head_dim * HOST_BITS[self.host_kv_dtype] // 8 + _SCALE_BYTES
        return -(-num_sides * num_heads * head_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def host_sides(self) -> HostSides:
        """A side is K or V of a layer. Of blocks of numbers.

        A block does not name its group. So where groups have heads of their own, all of a block is one side, in heads whose
        length divides those of all groups: the parts of a longer head have scales of their own.
        """
        if self._has_own_heads:
            head_dim = gcd(*(self._group_heads(group).head_dim for group in self.groups))
            return HostSides(1, self._num_elements // head_dim, head_dim)
        num_heads = self.block_size * self.num_kv_heads
        return HostSides(self._num_elements // (num_heads * self.head_dim), num_heads, self.head_dim)

    @property
    def stored_bytes(self) -> int:
        """Bytes of one block below the device: the shares of all ranks, one behind the other."""
        return self.num_ranks * self.host_block_bytes

    @property
    def _heads(self) -> Heads:
        return Heads(self.num_kv_heads, self.head_dim)

    @property
    def _has_own_heads(self) -> bool:
        return any(group.num_kv_heads for group in self.groups)

    def _group_heads(self, group: LayerGroup) -> Heads:
        return Heads(group.num_kv_heads, group.head_dim) if group.num_kv_heads else self._heads

    @property
    def _num_elements(self) -> int:
        """Elements of K and V in a block of the largest group, 0 where none has such. Of blocks without scales."""
        own = (len(group.layers) * self._group_heads(group).num_elements for group in self.groups if group.has_rows)
        return 2 * self.block_size * max(own, default=self.num_layers * self._heads.num_elements)


def first_parent(spec_key: bytes, scope: str) -> bytes:
    """The name that the first blocks of a scope are behind (scopes.py). spec_key: KvSpec.key."""
    return sha256(spec_key + b"\0" + scope.encode()).digest()


def block_name(parent: bytes, tokens: bytes) -> bytes:
    """The name of a block with these tokens, LE32, behind a parent of that name. Takes about a microsecond."""
    return sha256(parent + tokens).digest()
