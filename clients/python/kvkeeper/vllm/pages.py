"""Copies between vLLM's blocks and the pages of a pool, both in the host's memory: whole blocks, no format of their own.

A page has one part for each tensor of vLLM's. The arena is [num_pages, page_bytes]; a tensor is given as bytes with its blocks
first, [num_blocks, ...], and may be strided otherwise.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvkeeper.vllm.page_spec import Part, page_offsets

Bytes = npt.NDArray[np.uint8]


class Pages(Protocol):
    """Copies whole blocks. Ids on both sides are equally many."""

    def load(self, page_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy from the pool into vLLM's blocks; done when it returns."""

    def store(self, block_ids: Sequence[int], page_ids: Sequence[int]) -> None:
        """Copy from vLLM's blocks into the pool; done when it returns."""

    def close(self) -> None:
        """Views the pool's memory no more, so that it can be unmapped."""


class HostPages:
    """Pages and blocks that numpy can see. On a processor, copies by indexed operations of torch take 30 times as long."""

    def __init__(self, arena: Bytes, tensors: Sequence[Bytes], parts: Sequence[Part]) -> None:
        """arena: all bytes of the pool, of which whole pages are used. tensors: one for each part, [num_blocks, ...] bytes."""
        offsets, page_bytes = page_offsets(parts)
        pages = arena[: len(arena) // page_bytes * page_bytes].reshape(-1, page_bytes)
        self._pairs = []
        for tensor, part, offset in zip(tensors, parts, offsets, strict=True):
            assert tensor[0].nbytes == part.num_bytes, "a part is what its tensor has of one block"
            place = pages[:, offset : offset + part.num_bytes]
            view = place.reshape(len(pages), *tensor.shape[1:])
            assert np.shares_memory(view, place), "a copy would be written instead of the pool"
            self._pairs.append((view, tensor))

    def load(self, page_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        for pages, blocks in self._pairs:
            for page_id, block_id in zip(page_ids, block_ids, strict=True):
                blocks[block_id] = pages[page_id]

    def store(self, block_ids: Sequence[int], page_ids: Sequence[int]) -> None:
        for pages, blocks in self._pairs:
            for block_id, page_id in zip(block_ids, page_ids, strict=True):
                pages[page_id] = blocks[block_id]

    def close(self) -> None:
        self._pairs = []
