"""The KV spec: the facts two sessions must have in common to share K and V, and the bytes of a block."""

from dataclasses import dataclass
from typing import Final

from .read_span import ReadSpan

_SCALE_BYTES: Final = 2
_ALIGNMENT: Final = 16  # of blocks with scales


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
