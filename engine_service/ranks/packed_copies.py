"""PackedCopies: blocks between a device and a host tier that keeps them in few bits, converted where the device has them.

A BlockCopies (block_copies.py). The few bits cross as other blocks do, into memory of the device or out of it, and the host
waits for none of them: a conversion comes behind its copy in the order of the device. A few blocks are converted at once,
since their numbers take as much memory again, in float32.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from .block_copies import BlockCopies, SmallCopies, copies_between, copy_spans

_TOGETHER: Final = 16


class Packing(Protocol):
    """What HostBlocks is."""

    @property
    def block_bytes(self) -> int: ...

    def pack(self, blocks: torch.Tensor) -> torch.Tensor: ...

    def unpack(self, packed: torch.Tensor) -> torch.Tensor: ...


class PackedCopies:
    """See BlockCopies; which way blocks go is told by the bytes of a row, which are fewer on the host."""

    def __init__(self, packing: Packing, crossing: BlockCopies) -> None:
        """crossing: copies rows of the few bits between the device and the host."""
        self._packing, self._crossing = packing, crossing

    def make_ready(self, device_blocks: torch.Tensor, host_blocks: torch.Tensor) -> None:
        """As SmallCopies does, of rows of the few bits."""
        if isinstance(self._crossing, SmallCopies):
            rows = torch.zeros((1, host_blocks.shape[1]), dtype=torch.uint8, device=device_blocks.device)
            self._crossing.make_ready(rows, host_blocks)

    def __call__(self, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        is_out = target.shape[1] == self._packing.block_bytes
        for first in range(0, len(pairs), _TOGETHER):
            some = pairs[first : first + _TOGETHER]
            if is_out:
                packed = self._packing.pack(torch.stack([source[from_id] for from_id, _ in some]))
                self._crossing(packed, target, [(at, to_id) for at, (_, to_id) in enumerate(some)])
            else:
                packed = torch.empty((len(some), source.shape[1]), dtype=torch.uint8, device=target.device)
                self._crossing(source, packed, [(from_id, at) for at, (from_id, _) in enumerate(some)])
                copy_spans(self._packing.unpack(packed), target, [(at, to_id) for at, (_, to_id) in enumerate(some)])


def copies_for(packing: Packing | None, device: torch.device, host_blocks: torch.Tensor) -> BlockCopies:
    """The way for blocks between the device and these of the host. packing: None: the tiers have the same bytes."""
    crossing = copies_between(device, host_blocks)
    return crossing if packing is None else PackedCopies(packing, crossing)
