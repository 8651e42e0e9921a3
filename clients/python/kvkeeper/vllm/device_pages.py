"""The same copies where torch is needed: vLLM's tensors on a device, with the pool in CUDA memory or in the host's.

Copies run on a stream of their own, behind the work that the caller has waited for, and are done when a call returns.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvkeeper.client.arena import Arena
from kvkeeper.vllm.page_spec import Part, page_offsets

if TYPE_CHECKING:
    import torch

_MOST_BLOCKS = 64  # in one gather, which holds that many blocks of one tensor a second time


class DevicePages:
    """See Pages of pages.py."""

    def __init__(self, arena: Arena, tensors: Sequence["torch.Tensor"], parts: Sequence[Part]) -> None:
        """tensors: one for each part, [num_blocks, ...] bytes, all on one device."""
        import torch

        self._torch = torch
        self._device = tensors[0].device
        memory = (
            torch.as_tensor(arena.device_bytes(), device=self._device) if arena.is_on_device else torch.from_numpy(arena.array)
        )
        offsets, page_bytes = page_offsets(parts)
        pages = memory[: len(memory) // page_bytes * page_bytes].view(-1, page_bytes)
        self._pairs = [
            (pages[:, offset : offset + part.num_bytes].unflatten(1, tensor.shape[1:]), tensor)
            for tensor, part, offset in zip(tensors, parts, offsets, strict=True)
        ]
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def load(self, page_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        for pages, blocks in self._pairs:
            self._copy(pages, page_ids, blocks, block_ids)
        self._finish()

    def store(self, block_ids: Sequence[int], page_ids: Sequence[int]) -> None:
        for pages, blocks in self._pairs:
            self._copy(blocks, block_ids, pages, page_ids)
        self._finish()

    def close(self) -> None:
        self._pairs = []

    def _copy(
        self, source: "torch.Tensor", source_ids: Sequence[int], destination: "torch.Tensor", destination_ids: Sequence[int]
    ) -> None:
        torch = self._torch
        with torch.cuda.stream(self._stream):  # does nothing without one
            for at in range(0, len(source_ids), _MOST_BLOCKS):
                rows = slice(at, at + _MOST_BLOCKS)
                taken = torch.tensor(list(source_ids[rows]), device=source.device)
                placed = torch.tensor(list(destination_ids[rows]), device=destination.device)
                destination.index_copy_(0, placed, source.index_select(0, taken).to(destination.device))

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
