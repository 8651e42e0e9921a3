"""DeviceQueue: the order in which a device works, and how the host learns of what it has done.

A processor computes when it is called. A device has done nothing yet when a call returns: what the host reads comes by a copy
into memory of its own, and is there once a mark behind that copy has been passed. The host waits for such marks and for nothing
else. Copies of blocks have an order of their own beside it, and each of both can be put behind the other.

What a step copies, transfer orders and copies on write, is beside the forward pass where its blocks allow it: on a stream of
their own (CopyQueue), behind the steps that were launched before, which may still read and write the blocks. The forward pass
waits for the copies on write, and for a step's transfers only where it touches one of their blocks. Nothing else of the step
does, and its end waits for them, so that the one mark behind the step covers all that it did.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from ...scheduler.plan import Work


class Mark(Protocol):
    """A place in the queue."""

    def wait(self) -> None:
        """Wait until the device has done all that is before it."""


class CopyQueue(Protocol):
    """An order of work beside the queue's, on the same device: what is in both may be done at the same time."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run what launches copies. It begins when the copies before it are done."""

    def follow(self) -> None:
        """What is submitted here from now on begins when all is done that the queue has now."""

    def lead(self) -> None:
        """What the queue is given from now on, marks too, comes behind all that was submitted here."""


class DeviceQueue(Protocol):
    """All calls come from one thread, but for the waiting of marks."""

    @property
    def copies(self) -> CopyQueue:
        """For copies of blocks."""

    @property
    def is_immediate(self) -> bool:
        """Whether a step is to be read where it was launched, because all is done by then."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run what launches; what it reads of the host's memory may be read as late as it is done."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the host's memory, valid once a later mark was waited for. Called by work that was submitted."""

    def mark(self) -> Mark:
        """Set a mark behind all that was submitted."""


@runtime_checkable
class Queued(Protocol):
    """A model's runner that says in which order its device works."""

    @property
    def queue(self) -> DeviceQueue: ...


class _Passed:
    def wait(self) -> None:
        """Nothing is under way."""


class _HostCopies:
    """Done when they are submitted, as all is that came before."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def follow(self) -> None: ...

    def lead(self) -> None: ...


class HostQueue:
    """A processor's."""

    is_immediate = True

    def __init__(self) -> None:
        self.copies: CopyQueue = _HostCopies()

    def submit(self, work: Callable[[], None]) -> None:
        """See DeviceQueue."""
        work()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """See DeviceQueue. The tensor itself."""
        return tensor

    def mark(self) -> Mark:
        """See DeviceQueue."""
        return _Passed()


class CudaCopies:
    """A stream beside the current one. Each waits for the other by an event, on the device: the host goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # one that does not wait for the default stream by itself

    def submit(self, work: Callable[[], None]) -> None:
        """See CopyQueue. Memory that torch gives the work comes from this stream's, and goes back to it."""
        with torch.cuda.stream(self._stream):
            work()

    def follow(self) -> None:
        """See CopyQueue."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def lead(self) -> None:
        """See CopyQueue."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class CudaQueue:
    """The current stream of a CUDA device."""

    is_immediate = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: CopyQueue | None = None

    @property
    def copies(self) -> CopyQueue:
        """See DeviceQueue. A stream of its own, made with the first copy."""
        if self._copies is None:
            self._copies = CudaCopies(self._device)
        return self._copies

    def submit(self, work: Callable[[], None]) -> None:
        """See DeviceQueue."""
        with torch.cuda.device(self._device):
            work()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """See DeviceQueue. Into pinned memory, which torch keeps until the copy has been made."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> Mark:
        """See DeviceQueue."""
        with torch.cuda.device(self._device):
            return _Event()


def make_queue(device: torch.device) -> DeviceQueue:
    """The order in which this device works."""
    return CudaQueue(device) if device.type == "cuda" else HostQueue()


class _Event:
    """An event that lets the processor sleep while it is waited for: the loop goes on meanwhile."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def wait(self) -> None:
        """See Mark."""
        self._event.synchronize()


BlockIds = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """A step's transfer orders. run: launches them, in their order.

    Attributes:
        read: device blocks that they read.
        written: device blocks that they write.
    """

    run: Callable[[], None]
    read: BlockIds
    written: BlockIds

    def touch(self, work: Work, block_size: int) -> bool:
        """Whether the step's copies or its batch write what the orders read, or use what they write."""
        pairs = np.array(work.copies, np.int64).reshape(-1, 2)
        written: list[BlockIds] = [pairs[:, 1]]
        used: list[BlockIds] = [pairs.reshape(-1)]
        if (batch := work.batch) is not None:
            written.append(_find_blocks(batch.slot_mapping, block_size))
            used.append(batch.block_tables.reshape(-1))
            if batch.group_tables is not None and batch.group_slots is not None:
                written.append(_find_blocks(batch.group_slots.reshape(-1), block_size))
                used.append(batch.group_tables.reshape(-1))
        ours, theirs = np.concatenate(written), np.concatenate([*used, *written])
        return bool(np.isin(self.read, ours).any() or np.isin(self.written, theirs).any())


def submit_step(
    queue: DeviceQueue,
    work: Work,
    moves: Moves | None,
    block_size: int,
    copy_blocks: Callable[[], None],
    forward: Callable[[], None],
) -> None:
    """Submit all of a step: its transfers, its copies on write, by copy_blocks, and what else it computes, by forward."""
    if moves is None and not work.copies:
        queue.submit(forward)
        return
    queue.copies.follow()
    are_apart = moves is not None and not moves.touch(work, block_size)
    if moves is not None and not are_apart:
        queue.copies.submit(moves.run)
    if work.copies:
        queue.copies.submit(copy_blocks)
    if work.copies or not are_apart:
        queue.copies.lead()
    if moves is not None and are_apart:
        queue.copies.submit(moves.run)
    queue.submit(forward)
    if are_apart:
        queue.copies.lead()


def _find_blocks(slots: npt.NDArray[np.int64], block_size: int) -> BlockIds:
    return slots[slots >= 0] // block_size
