"""TransferRunner: runs the transfer orders of the cache service between the device and the host tier, a step's together.

Orders run in the worker thread, or in the order of the device. Of each step that is computed, and of one that runs ahead, it
keeps which of them ended; once the step is computed, these wait until the cache service has learned of them. When such a report
is lost, so is the session, and its orders with it: nothing is reported twice.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from kvkeeper.client.steps import StepResult
from kvkeeper.kernels.quantised.host_blocks import HostBlocks

from ..compute.device.device_queue import Moves
from ..ranks.block_copies import SWAP_IN, SWAP_OUT, BlockMover, copies_for
from ..ranks.ranked_runner import RankedRunner
from ..scheduler.headroom import Moved


@dataclass(slots=True, eq=False)
class _Ended:
    """The orders of a step that ended, and how long they took. The worker thread has it until the step has ended."""

    done: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    moving_seconds: Callable[[], float] = float


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
        self._of_steps: deque[_Ended] = deque()  # that are computed and have orders
        self._moved = Moved()  # by those of the step that was computed last

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
        ended = _Ended()
        self._of_steps.append(ended)
        return Moves(partial(self._run, answer, ended), sources[are_out], destinations[~are_out])

    def _run(self, answer: StepResult, ended: _Ended) -> None:
        stop_clock = _start_clock(self._device_blocks.device)
        if self._other_ranks is not None:
            self._other_ranks.run_transfers(answer)
        columns = (answer.transfer_ids, answer.transfer_kinds, answer.transfer_sources, answer.transfer_destinations)
        orders = zip(*(column.tolist() for column in columns), strict=True)
        ended.done, ended.failed = self._mover.move(orders)
        ended.moving_seconds = stop_clock()

    def note_computed(self) -> bool:
        """The first of the steps that have orders has been computed: these are to be reported. Whether one of them failed."""
        ended = self._of_steps.popleft()
        if num_bytes := len(ended.done) * self._device_blocks.shape[1]:
            self._moved = Moved(num_bytes, ended.moving_seconds())
        if self._other_ranks is not None:
            elsewhere = self._other_ranks.take_failed(ended.done + ended.failed) - set(ended.failed)
            ended.done = [order for order in ended.done if order not in elsewhere]
            ended.failed += elsewhere
        self._done += ended.done
        self._failed += ended.failed
        return bool(ended.failed)

    def take_moved(self) -> Moved:
        """The bytes that the computed step's orders have moved, and the seconds. The next call starts from zero."""
        moved, self._moved = self._moved, Moved()
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


def has_loads(answer: StepResult) -> bool:
    """Whether a step's orders bring blocks from the host tier, which sequences wait for."""
    return bool((np.asarray(answer.transfer_kinds) == SWAP_IN).any()) if len(answer.transfer_ids) else False


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
