"""BlockMover: transfer orders of the cache service, run between the device and the host tier, a step's together.

Orders that do not depend on each other go in one call. What a call is made of is the device's: see block_copies.py.
"""

from collections.abc import Iterable

import structlog
import torch

from kvkeeper.kernels.copy_blocks import independent_runs

from .block_copies import BlockCopies, PackedCopies, SmallCopies, copies_between

log = structlog.get_logger()

SWAP_OUT = 1  # TransferKind of the protocol
Order = tuple[int, int, int, int]  # id, kind, source, destination


class BlockMover:
    """Moves blocks between tensors uint8 [blocks, block_bytes]."""

    def __init__(self, device_blocks: torch.Tensor, host_blocks: torch.Tensor, copies: BlockCopies | None = None) -> None:
        """copies: None: those that suit the memory."""
        self._device_blocks, self._host_blocks = device_blocks, host_blocks
        self._copies = copies or copies_between(device_blocks.device, host_blocks)

    def make_ready(self) -> None:
        """Compile what copies launch. To be called once the host's memory is pinned as far as it can be."""
        if isinstance(self._copies, SmallCopies | PackedCopies):
            self._copies.make_ready(self._device_blocks, self._host_blocks)

    def move(self, orders: Iterable[Order]) -> tuple[list[int], list[int]]:
        """Run the orders as if in order. Ids of those that are done, or on their way on a device, and of those that failed."""
        kept: list[Order] = []
        failed: list[Order] = []
        for order in orders:
            (kept if self._is_inside(*order[1:]) else failed).append(order)
        if failed:
            log.error("transfer_failed", order_ids=[order[0] for order in failed], message="no such block")
        done: list[Order] = []
        at = 0
        # A block of the host has a negative number here, so that all have one of their own.
        pairs = [(source, ~to) if kind == SWAP_OUT else (~source, to) for _, kind, source, to in kept]
        for run in independent_runs(pairs, at_once=True):
            ordered, at = kept[at : at + len(run)], at + len(run)
            for is_out in (True, False):
                chosen = [order for order in ordered if (order[1] == SWAP_OUT) == is_out]
                (done if self._copy(chosen, is_out=is_out) else failed).extend(chosen)
        return [order[0] for order in done], [order[0] for order in failed]

    def _copy(self, orders: list[Order], *, is_out: bool) -> bool:
        source, target = self._device_blocks, self._host_blocks
        if not is_out:
            source, target = target, source
        try:
            if orders:
                self._copies(source, target, [(from_id, to_id) for _, _, from_id, to_id in orders])
        except Exception:  # whatever a driver says of it: the cache service hears that they failed
            log.exception("transfer_failed", order_ids=[order[0] for order in orders])
            return False
        return True

    def _is_inside(self, kind: int, source: int, destination: int) -> bool:
        tiers = (self._device_blocks, self._host_blocks) if kind == SWAP_OUT else (self._host_blocks, self._device_blocks)
        return 0 <= source < len(tiers[0]) and 0 <= destination < len(tiers[1])
