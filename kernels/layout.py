"""The layout of KV memory: the meaning of a block's bytes.

Block-major: one block is contiguous over all layers, [num_layers, 2, block_size, num_kv_heads, head_dim], so that it
moves between tiers, or is copied on write, with one copy. The second axis is K, then V; latents, which are both, have one
place there. Block 0 is the null block: never allocated, the target of padding.

Where layers have heads of several shapes, each group of layers has blocks of its own shape. All blocks have the size of the
largest, and what a smaller one leaves at its end is unused.
"""

from dataclasses import dataclass
from typing import Final

import torch

from .checks import require, require_arena

NULL_BLOCK_ID: Final = 0


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of a group's blocks: counts, at least 1."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def token_elements(self) -> int:
        """Elements of one of a token's keys, or of its values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and dtype of one block.

    Attributes:
        num_layers, num_kv_heads, head_dim, block_size: counts, at least 1; block_size is in tokens.
        dtype: torch dtype of K and V elements.
        is_latent: a slot holds a latent vector and a rotated key, head_dim numbers of one "head", instead of K and V.
        others: shapes of the blocks of the groups behind the first, where they differ; (): all groups have blocks of one shape.

    Raises KernelArgumentError for a count below 1, or where tokens of a shape do not fill a block without a rest.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    is_latent: bool = False
    others: tuple[KvShape, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            require(getattr(self, name) >= 1, "KvLayout", name, "must be at least 1, is {}", getattr(self, name))
        for shape in self.others:
            least = min(shape.num_layers, shape.num_kv_heads, shape.head_dim)
            require(least >= 1, "KvLayout", "others", "must have counts of at least 1, hold {}", shape)
        for shape in self._shapes:
            fits = self._block_elements % shape.token_elements == 0
            problem = "must fill blocks of {} elements without a rest, hold {}"
            require(fits, "KvLayout", "others", problem, self._block_elements, shape)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: 2 (of latents 1) x layers x heads x dim x block size x element size, of the largest shape."""
        return self._block_elements * self.dtype.itemsize

    @property
    def _shapes(self) -> tuple[KvShape, ...]:
        return (KvShape(self.num_layers, self.num_kv_heads, self.head_dim), *self.others)

    @property
    def _block_elements(self) -> int:
        most = max(shape.num_layers * shape.token_elements for shape in self._shapes)
        return self._num_planes * most * self.block_size

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Shape of one block in the view: [num_layers, 2 (of latents 1), block_size, num_kv_heads, head_dim].

        Where groups have blocks of other shapes: [elements of a block].
        """
        if self.others:
            return (self._block_elements,)
        return (self.num_layers, self._num_planes, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def _num_planes(self) -> int:
        return 1 if self.is_latent else 2

    def view(self, arena_bytes: torch.Tensor) -> torch.Tensor:
        """View an arena as [num_blocks, *view_shape], without a copy.

        Args:
            arena_bytes: uint8 [num_blocks * block_bytes], contiguous, at least one block (the null block).

        Raises:
            KernelArgumentError: another dtype, not contiguous, or not a whole number of blocks.
        """
        require_arena("KvLayout.view", arena_bytes, self.block_bytes)
        return arena_bytes.view(self.dtype).view(-1, *self.view_shape)

    def view_group(self, kv_view: torch.Tensor, group: int) -> torch.Tensor:
        """The blocks of a group [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], in a view of all blocks."""
        if not self.others:
            return kv_view
        shape = self._shapes[group]
        sizes = shape.num_layers, self._num_planes, self.block_size, shape.num_kv_heads, shape.head_dim
        blocks = kv_view[:, : self._num_planes * self.block_size * shape.num_layers * shape.token_elements]
        return blocks.unflatten(1, sizes)
