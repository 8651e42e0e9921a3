"""What a step copies: transfer orders and copies on write, beside the forward pass where their blocks allow it.

They run on a stream of their own (CopyQueue), behind the steps that were launched before: those may still read and write the
blocks. The forward pass waits for the copies on write, and for a step's transfers only where it touches one of their blocks.
Nothing else of the step does, and its end waits for them, so that the one mark behind the step covers all that it did.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...scheduler.plan import Work
from .device_queue import DeviceQueue

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
            written.append(_blocks_of(batch.slot_mapping, block_size))
            used.append(batch.block_tables.reshape(-1))
            if batch.group_tables is not None and batch.group_slots is not None:
                written.append(_blocks_of(batch.group_slots.reshape(-1), block_size))
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


def _blocks_of(slots: npt.NDArray[np.int64], block_size: int) -> BlockIds:
    return slots[slots >= 0] // block_size
