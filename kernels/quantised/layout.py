"""The layout of blocks of stored K and V, and of the pages of the tail beside them.

A block has all layers: for each layer K and then V, each of them the elements [block_size, num_kv_heads, row_bytes] of its
tokens and behind these their scales [block_size, num_kv_heads], bfloat16. So a block moves between tiers, or is copied, with
one copy. A page of the tail holds some layers as they are computed, [tail_layers, 2, block_size, num_kv_heads, head_dim];
blocks and pages have one size, a multiple of 16 bytes where there are scales or pages, and what either leaves of it is not
used.
"""

from dataclasses import dataclass

import torch

from ..checks import require, require_arena
from .formats import KvFormat

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class QuantisedLayout:
    """Shape and format of one block.

    Attributes:
        num_layers, num_kv_heads, head_dim, block_size: counts, at least 1; block_size is in tokens.
        kv_format: of stored K and V.
        dtype: of the computation, and of the tail's elements.
        tail_layers: of a page of the tail; 0: there is no tail.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_format: KvFormat
    dtype: torch.dtype
    tail_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            require(getattr(self, name) >= 1, "QuantisedLayout", name, "must be at least 1, is {}", getattr(self, name))
        self.kv_format.row_bytes(self.head_dim)

    @property
    def elements_bytes(self) -> int:
        """The bytes of the elements of K, or of V, of one layer."""
        return self.block_size * self.num_kv_heads * self.kv_format.row_bytes(self.head_dim)

    @property
    def side_bytes(self) -> int:
        """The bytes of K, or of V, of one layer."""
        return self.elements_bytes + self.block_size * self.num_kv_heads * self.kv_format.scale_bytes

    @property
    def block_bytes(self) -> int:
        tail = self.tail_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        stored = self.num_layers * 2 * self.side_bytes
        if not tail and not self.kv_format.scale_bytes:
            return stored
        return -(-max(tail, stored) // _ALIGNMENT) * _ALIGNMENT

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Shape of one block in the view: its bytes."""
        return (self.block_bytes,)

    def view(self, arena_bytes: torch.Tensor) -> torch.Tensor:
        """View an arena as blocks, uint8 [num_blocks, block_bytes], without a copy.

        Raises:
            KernelArgumentError: another dtype, not contiguous, or not a whole number of blocks.
        """
        require_arena("QuantisedLayout.view", arena_bytes, self.block_bytes)
        return arena_bytes.view(-1, self.block_bytes)


@dataclass(frozen=True, slots=True)
class QuantisedLayer:
    """One layer in every block of an arena. Made once for an arena, since views cost more than what they are used for.

    Attributes:
        elements: uint8 [num_blocks, 2, block_size, num_kv_heads, row_bytes].
        scales: int16 [num_blocks, 2, block_size, num_kv_heads], bits of bfloat16; without elements where the format has none.
        tail: [num_blocks, 2, block_size, num_kv_heads, head_dim] of layout.dtype, the layer in pages; None: no tail.
    """

    layout: QuantisedLayout
    elements: torch.Tensor
    scales: torch.Tensor
    tail: torch.Tensor | None


def get_layer(view: torch.Tensor, layout: QuantisedLayout, layer: int) -> QuantisedLayer:
    """Layer `layer` of the blocks of layout.view. In the tail it is layer % tail_layers of its group's pages."""
    num_blocks, heads, size = view.shape[0], layout.num_kv_heads, layout.block_size
    row, start = layout.kv_format.row_bytes(layout.head_dim), layer * 2 * layout.side_bytes
    stride, side = layout.block_bytes, layout.side_bytes
    elements = view.as_strided(
        (num_blocks, 2, size, heads, row), (stride, side, heads * row, row, 1), view.storage_offset() + start
    )
    if layout.kv_format.scale_bytes:
        halves = view.view(torch.int16)
        scales = halves.as_strided(
            (num_blocks, 2, size, heads),
            (stride // 2, side // 2, heads, 1),
            halves.storage_offset() + (start + layout.elements_bytes) // 2,
        )
    else:
        scales = torch.empty((num_blocks, 2, size, 0), dtype=torch.int16, device=view.device)
    tail = None
    if layout.tail_layers:
        numbers, slot = view.view(layout.dtype), heads * layout.head_dim
        tail = numbers.as_strided(
            (num_blocks, 2, size, heads, layout.head_dim),
            (stride // layout.dtype.itemsize, size * slot, slot, layout.head_dim, 1),
            numbers.storage_offset() + layer % layout.tail_layers * 2 * size * slot,
        )
    return QuantisedLayer(layout, elements, scales, tail)
