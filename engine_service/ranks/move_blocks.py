"""move_blocks: transfer orders of the cache service, run between the device and the host tier.

Blocks move one by one as they are, or, where the host tier keeps them in few bits, a few at a time: they are converted on the
device, and their few bits move.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

import structlog
import torch

from kvkeeper.kernels.quantised.host_blocks import HostBlocks

log = structlog.get_logger()

SWAP_OUT = 1  # TransferKind of the protocol
Order = tuple[int, int, int, int]  # id, kind, source, destination
_TOGETHER = 16  # blocks that are converted at once: their numbers take as much memory again, in float32


def move_blocks(
    device_blocks: torch.Tensor, host_blocks: torch.Tensor, orders: Iterable[Order], packing: HostBlocks | None = None
) -> tuple[list[int], list[int]]:
    """Run the orders in order, on tensors uint8 [blocks, bytes of a block]. Answers ids of those done, and of those failed.

    packing: of a host tier that keeps blocks in few bits; without it blocks have the same bytes in both tiers.
    """
    done: list[int] = []
    failed: list[int] = []
    left = [[order] for order in orders] if packing is None else list(_batches(orders))
    left.reverse()
    while left:
        batch = left.pop()
        try:
            if packing is None:
                _move(device_blocks, host_blocks, *batch[0][1:])
            else:
                _convert(device_blocks, host_blocks, batch, packing)
            done += [order[0] for order in batch]
        except (IndexError, RuntimeError):  # torch raises the latter for everything else that can be wrong with a copy
            if len(batch) > 1:  # which of them it was shows one by one
                left += [[order] for order in reversed(batch)]
                continue
            log.error("transfer_failed", order_id=batch[0][0])
            failed.append(batch[0][0])
    return done, failed


def _move(device_blocks: torch.Tensor, host_blocks: torch.Tensor, kind: int, source: int, destination: int) -> None:
    if kind == SWAP_OUT:
        host_blocks[destination].copy_(device_blocks[source], non_blocking=True)
    else:
        device_blocks[destination].copy_(host_blocks[source], non_blocking=True)


def _convert(device_blocks: torch.Tensor, host_blocks: torch.Tensor, batch: list[Order], packing: HostBlocks) -> None:
    """Orders of one kind."""
    sources, destinations = [order[2] for order in batch], [order[3] for order in batch]
    if batch[0][1] == SWAP_OUT:
        packed = packing.pack(torch.stack([device_blocks[source] for source in sources]))
        for row, destination in zip(packed, destinations, strict=True):
            host_blocks[destination].copy_(row, non_blocking=True)
        return
    rows = [host_blocks[source].to(device_blocks.device, non_blocking=True) for source in sources]
    for block, destination in zip(packing.unpack(torch.stack(rows)), destinations, strict=True):
        device_blocks[destination].copy_(block)


def _batches(orders: Iterable[Order]) -> Iterator[list[Order]]:
    """Runs of orders of one kind: none of them reads what another writes, because all read one tier and write the other."""
    for _, run in groupby(orders, lambda order: order[1]):
        batch: list[Order] = []
        for order in run:
            batch.append(order)
            if len(batch) == _TOGETHER:
                yield batch
                batch = []
        if batch:
            yield batch
