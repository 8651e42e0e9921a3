"""TransferRunner: runs the transfer orders of the cache service between the device and the host tier, a step's together.

Orders run in the worker thread, or in the order of the device; which of them ended is kept until the cache service has
learned of it. When such a report is lost, so is the session, and its orders with it: nothing is reported twice.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvkeeper.client.steps import StepResult
from kvkeeper.kernels.quantised.host_blocks import HostBlocks

from ..compute.device.device_queue import Moves
from ..ranks.block_copies import SWAP_OUT, BlockMover, copies_for
from ..ranks.ranked_runner import RankedRunner
from ..scheduler.headroom import Moved

_NO_BLOCKS = torch.empty((0, 1), dtype=torch.uint8)


class TransferRunner:
    """Copies blocks between a pool's device memory and its host tier, and keeps the orders that ended."""

    def __init__(
        self,
        device_blocks: torch.Tensor,
        host_blocks: torch.Tensor,
        other_ranks: RankedRunner | None = None,
        packing: HostBlocks | None = None,
    ) -> None:
        """Both: uint8 [blocks, bytes of a block], views of the arena. An order is done when it is done on all ranks.

        packing: of a host tier that keeps blocks in few bits.
        """
        self._other_ranks = other_ranks
        self._device_blocks = device_blocks
        self._mover = BlockMover(device_blocks, host_blocks, copies_for(packing, device_blocks.device, host_blocks))
        self._done: list[int] = []  # orders that ended, and that the cache service does not know of yet
        self._failed: list[int] = []
        self._done_now: list[int] = []  # of the step that is computed: the worker thread's until it has ended
        self._failed_now: list[int] = []
        self._num_moved_bytes = 0  # by the orders of the step that is computed
        self._moving_seconds: Callable[[], float] = float  # that this took

    def make_ready(self) -> None:
        """Once the host tier is pinned, and before the first order; on this rank."""
        self._mover.make_ready()

    @property
    def has_unreported(self) -> bool:
        """Whether orders have ended that the cache service does not know of yet."""
        return bool(self._done or self._failed)

    def make_moves(self, answer: StepResult) -> Moves | None:
        """A step's orders, to be run as part of the step; None: it has none."""
        if not len(answer.transfer_ids):
            return None
        are_out = np.asarray(answer.transfer_kinds) == SWAP_OUT
        sources, destinations = answer.transfer_sources, answer.transfer_destinations
        return Moves(partial(self._run, answer), sources[are_out], destinations[~are_out])

    def _run(self, answer: StepResult) -> None:
        stop_clock = _start_clock(self._device_blocks.device)
        if self._other_ranks is not None:
            self._other_ranks.run_transfers(answer)
        columns = (answer.transfer_ids, answer.transfer_kinds, answer.transfer_sources, answer.transfer_destinations)
        orders = zip(*(column.tolist() for column in columns), strict=True)
        done, failed = self._mover.move(orders)
        self._done_now += done
        self._failed_now += failed
        if self._other_ranks is not None:
            self._other_ranks.synchronize()  # a step without a batch counts as done when this returns
        self._num_moved_bytes = len(self._done_now) * self._device_blocks.shape[1]
        self._moving_seconds = stop_clock()

    def note_computed(self) -> bool:
        """The step has been computed: its orders are to be reported. Whether one of them failed."""
        if self._other_ranks is not None and (elsewhere := set(self._other_ranks.take_failed()) - set(self._failed_now)):
            self._done_now = [order for order in self._done_now if order not in elsewhere]
            self._failed_now += elsewhere
        has_failed = bool(self._failed_now)
        self._done += self._done_now
        self._failed += self._failed_now
        self._done_now, self._failed_now = [], []
        return has_failed

    def take_moved(self) -> Moved:
        """The bytes that the computed step's orders have moved, and the seconds. The next call starts from zero."""
        moved = Moved(self._num_moved_bytes, self._moving_seconds()) if self._num_moved_bytes else Moved()
        self._num_moved_bytes = 0
        return moved

    def take_ended(self) -> tuple[list[int], list[int]]:
        """Ids of the orders that are done and of those that failed, for the report; they are forgotten here."""
        ended = self._done, self._failed
        self._done, self._failed = [], []
        return ended

    def drop_blocks(self) -> None:
        """Release the views of the arena; no order can be run afterwards."""
        self._other_ranks = None
        self._device_blocks = _NO_BLOCKS
        self._mover = BlockMover(_NO_BLOCKS, _NO_BLOCKS)


def _start_clock(device: torch.device) -> Callable[[], Callable[[], float]]:
    """A call that stops the clock. It returns a second call that gives the seconds, once the device has got that far."""
    if device.type == "cuda":
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()

        def stop_on_device() -> Callable[[], float]:
            last.record()
            return lambda: first.elapsed_time(last) / 1000

        return stop_on_device
    started_at = time.perf_counter()

    def stop() -> Callable[[], float]:
        seconds = time.perf_counter() - started_at
        return lambda: seconds

    return stop
