"""Where torch is needed: vLLM's tensors as blocks of bytes, and copies with tensors or a pool on a device.

Copies run on a stream of their own, behind the work that the caller has waited for, and are done when a call returns.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvkeeper.client.arena import Arena
from kvkeeper.vllm.page_spec import Part, page_offsets
from kvkeeper.vllm.settings import WrongSettings

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


def list_parts(kv_caches: Mapping[str, "torch.Tensor"], num_blocks: int) -> tuple[list["torch.Tensor"], list[Part]]:
    """vLLM's tensors as bytes, [num_blocks, ...], each once, and what they are. The order within a block is that in memory.

    kv_caches: layer to tensor. Raises WrongSettings for a tensor in which the blocks cannot be found.
    """
    import torch

    tensors, parts, seen = [], [], set()
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise WrongSettings("KvkeeperConnector serves attention layers only")
        if (tensor.data_ptr(), tensor.shape) in seen:  # layers that share K and V
            continue
        seen.add((tensor.data_ptr(), tensor.shape))
        blocks = _blocks_first(tensor, num_blocks)
        order = sorted(range(1, blocks.dim()), key=lambda dim: -blocks.stride()[dim])
        found = blocks.permute(0, *order).view(torch.uint8)
        if found[0].is_contiguous():  # one piece of memory, and one copy
            found = found.flatten(1)
        tensors.append(found)
        shape = tuple(blocks.shape[1:])
        parts.append(Part(name, f"{tensor.dtype} in order {order}", shape, found[0].numel()))
    return tensors, parts


def _blocks_first(tensor: "torch.Tensor", num_blocks: int) -> "torch.Tensor":
    """[num_blocks, ...]. Raises WrongSettings."""
    for dim in range(min(2, tensor.dim())):
        if tensor.shape[dim] == num_blocks:
            return tensor.movedim(dim, 0)
    if tensor.shape[0] % num_blocks == 0:  # a block of vLLM's is several of the kernel's
        return tensor.unflatten(0, (num_blocks, tensor.shape[0] // num_blocks))
    raise WrongSettings("KvkeeperConnector does not know where a block is in this K and V")
