"""move_blocks: transfer orders of the cache service, run block by block between the device and the host tier."""

from collections.abc import Iterable

import structlog
import torch

log = structlog.get_logger()

SWAP_OUT = 1  # TransferKind of the protocol
Order = tuple[int, int, int, int]  # id, kind, source, destination


def move_blocks(device_blocks: torch.Tensor, host_blocks: torch.Tensor, orders: Iterable[Order]) -> tuple[list[int], list[int]]:
    """Run the orders in order, on tensors uint8 [blocks, block_bytes]. Ids of those that are done, and of those that failed."""
    done: list[int] = []
    failed: list[int] = []
    for order_id, kind, source, destination in orders:
        try:
            if kind == SWAP_OUT:
                host_blocks[destination].copy_(device_blocks[source], non_blocking=True)
            else:
                device_blocks[destination].copy_(host_blocks[source], non_blocking=True)
            done.append(order_id)
        except (IndexError, RuntimeError):  # torch raises the latter for everything else that can be wrong with a copy
            log.error("transfer_failed", order_id=order_id)
            failed.append(order_id)
    return done, failed
