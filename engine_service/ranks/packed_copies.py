"""PackedCopies: blocks between a device and a host tier that keeps them in few bits, converted where the device has them.

A BlockCopies (block_copies.py). A few blocks are converted at once, since their numbers take as much memory again, in float32.
"""

from collections.abc import Sequence
from typing import Final

import torch

from kvkeeper.kernels.quantised.host_blocks import HostBlocks

from .block_copies import BlockCopies

_TOGETHER: Final = 16


class PackedCopies:
    """See BlockCopies; which way blocks go is told by the bytes of a row, which are fewer on the host."""

    def __init__(self, packing: HostBlocks) -> None:
        self._packing = packing

    def __call__(self, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        is_out = target.shape[1] == self._packing.block_bytes
        for first in range(0, len(pairs), _TOGETHER):
            some = pairs[first : first + _TOGETHER]
            rows = torch.stack([source[from_id].to(target.device if not is_out else source.device) for from_id, _ in some])
            converted = self._packing.pack(rows) if is_out else self._packing.unpack(rows)
            for row, (_, to_id) in zip(converted, some, strict=True):
                target[to_id].copy_(row, non_blocking=True)


def copies_for(packing: HostBlocks | None) -> BlockCopies | None:
    """None: the tiers have the same bytes."""
    return None if packing is None else PackedCopies(packing)
