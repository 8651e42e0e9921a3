"""The layout of KV memory: the meaning of a block's bytes.

Block-major: one block is contiguous over all layers, [num_layers, 2, block_size, num_kv_heads, head_dim], so that it
moves between tiers, or is copied on write, with one copy. The second axis is K, then V; latents, which are both, have one
place there. Block 0 is the null block: never allocated, the target of padding.
"""

from dataclasses import dataclass
from typing import Final

import torch

from .checks import require, require_arena

NULL_BLOCK_ID: Final = 0


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and dtype of one block.

    Attributes:
        num_layers, num_kv_heads, head_dim, block_size: counts, at least 1; block_size is in tokens.
        dtype: torch dtype of K and V elements.
        is_latent: a slot holds a latent vector and a rotated key, head_dim numbers of one "head", instead of K and V.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    is_latent: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            require(getattr(self, name) >= 1, "KvLayout", name, "must be at least 1, is {}", getattr(self, name))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: 2 (of latents 1) x layers x heads x dim x block size x element size."""
        elements = self._num_planes * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size
        return elements * self.dtype.itemsize

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Shape of one block in the view: [num_layers, 2 (of latents 1), block_size, num_kv_heads, head_dim]."""
        return (self.num_layers, self._num_planes, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def _num_planes(self) -> int:
        return 1 if self.is_latent else 2

    def view(self, arena_bytes: torch.Tensor) -> torch.Tensor:
        """View an arena as [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], without a copy.

        Args:
            arena_bytes: uint8 [num_blocks * block_bytes], contiguous, at least one block (the null block).

        Raises:
            KernelArgumentError: another dtype, not contiguous, or not a whole number of blocks.
        """
        require_arena("KvLayout.view", arena_bytes, self.block_bytes)
        return arena_bytes.view(self.dtype).view(-1, *self.view_shape)
