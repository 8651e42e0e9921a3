"""HostBlocks: blocks of numbers on their way to a host tier that keeps them in few bits, and back, on any device.

Owns the layout there: for each layer of a block K and then V, each of them the elements of its tokens [block_size,
num_kv_heads, row_bytes] and behind these their scales [block_size, num_kv_heads], bfloat16; a block is a multiple of 16 bytes.
The arithmetic is that of formats.py, in plain torch on the device where the blocks are, so that only the few bits cross to the
host. Each token and head has its own scale, so slots that no token has filled harm no other.
"""

from dataclasses import dataclass
from typing import Final

import torch

from ..checks import require
from .formats import KvFormat, dequantise, quantise

_ALIGNMENT: Final = 16
_MOST_HALF: Final = 65504.0


@dataclass(frozen=True, slots=True)
class HostBlocks:
    """How blocks of one pool are kept on the host.

    Attributes:
        num_sides: K and V of each layer of a block.
        block_size, num_kv_heads, head_dim: counts; block_size is in tokens.
        dtype: of a block's numbers on the device.
        kv_format: of them on the host; it has scales.
    """

    num_sides: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_format: KvFormat

    def __post_init__(self) -> None:
        require(
            bool(self.kv_format.scale_bytes), "HostBlocks", "kv_format", "must have scales, {} has none", self.kv_format.name
        )
        self.kv_format.row_bytes(self.head_dim)

    @property
    def block_bytes(self) -> int:
        """The bytes of a block on the host."""
        return -(-self.num_sides * self._side_bytes // _ALIGNMENT) * _ALIGNMENT

    def pack(self, blocks: torch.Tensor) -> torch.Tensor:
        """Blocks as they are kept, uint8 [n, block_bytes], of blocks uint8 [n, bytes of a block], contiguous."""
        count = blocks.shape[0]
        numbers = blocks.view(self.dtype).view(count, self.num_sides, self.block_size, self.num_kv_heads, self.head_dim)
        elements, scales = quantise(numbers, self.kv_format)
        packed = torch.zeros((count, self.block_bytes), dtype=torch.uint8, device=blocks.device)
        sides = self._sides(packed)
        sides[:, :, : self._elements_bytes] = elements.flatten(2)
        sides[:, :, self._elements_bytes :] = scales.contiguous().view(torch.uint8).flatten(2)
        return packed

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Blocks uint8 [n, bytes of a block] of what `pack` made, with each number rounded to the dtype."""
        sides = self._sides(packed)
        heads = self.block_size, self.num_kv_heads
        elements = sides[:, :, : self._elements_bytes].unflatten(2, (*heads, -1)).contiguous()
        scales = sides[:, :, self._elements_bytes :].contiguous().view(torch.int16).unflatten(2, heads)
        numbers = dequantise(elements, scales, self.kv_format, torch.float32)
        if self.dtype is torch.float16:  # rounding to few bits may have put a number past the greatest
            numbers = numbers.clamp(-_MOST_HALF, _MOST_HALF)
        return numbers.to(self.dtype).flatten(1).view(torch.uint8)

    @property
    def _elements_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.kv_format.row_bytes(self.head_dim)

    @property
    def _side_bytes(self) -> int:
        return self._elements_bytes + self.block_size * self.num_kv_heads * self.kv_format.scale_bytes

    def _sides(self, packed: torch.Tensor) -> torch.Tensor:
        return packed[:, : self.num_sides * self._side_bytes].unflatten(1, (self.num_sides, self._side_bytes))
