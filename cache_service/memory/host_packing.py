"""HostPacking: blocks of numbers on their way to the tiers below the device, where they are kept in few bits, and back.

Owns the layout of a block there: sides, which are for each layer of a block K and then V, or all of a block at once
(KvSpec.host_sides); each of them the elements of its heads, and behind these their scales. Each token and head has a scale of
its own, so slots that no token has filled yet harm no other. A pool that keeps its blocks as they are has none of this.
"""

import numpy as np

from ..core.values.kv_spec import HOST_BITS, KvSpec
from .kv_numbers import SCALE_BYTES, ByteArray, dequantise, quantise, to_elements, to_numbers


class HostPacking:
    """How host blocks are packed, for one KV spec with a host_kv_dtype and each of its ranks."""

    def __init__(self, spec: KvSpec) -> None:
        assert spec.host_kv_dtype, "blocks that are kept as they are need no packing"
        self._format, self._element_type = spec.host_kv_dtype, spec.element_type
        self._sides, num_heads, head_dim = spec.host_sides
        self._heads = self._sides, num_heads
        self._row_bytes = head_dim * HOST_BITS[self._format] // 8
        self._elements_bytes = num_heads * self._row_bytes
        self._side_bytes = self._elements_bytes + num_heads * SCALE_BYTES

    def pack(self, block: ByteArray, row: ByteArray) -> None:
        """Fills a row of the host tier [host_block_bytes] with a block [block_bytes]."""
        numbers = to_numbers(block.reshape(*self._heads, -1), self._element_type)
        elements, scales = quantise(numbers, self._format)
        sides = self._get_sides(row)
        sides[:, : self._elements_bytes] = elements.reshape(self._sides, -1)
        sides[:, self._elements_bytes :] = scales.astype("<u2", copy=False).view(np.uint8).reshape(self._sides, -1)

    def unpack(self, row: ByteArray, block: ByteArray) -> None:
        """Fills a block [block_bytes] with a row of the host tier [host_block_bytes]."""
        sides = self._get_sides(row)
        elements = sides[:, : self._elements_bytes].reshape(*self._heads, self._row_bytes)
        scales = np.ascontiguousarray(sides[:, self._elements_bytes :]).view("<u2").reshape(self._heads)
        block[:] = to_elements(dequantise(elements, scales, self._format), self._element_type).ravel()

    def _get_sides(self, row: ByteArray) -> ByteArray:
        return row[: self._sides * self._side_bytes].reshape(self._sides, self._side_bytes)
