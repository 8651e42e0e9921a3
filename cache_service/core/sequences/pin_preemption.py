"""When pins give way: to a sequence that runs alone and could not go on beside them.

Owns this one rule. Pins give way to nothing else, because all other holders of blocks end in time, and fences are lifted soon.
"""

import numpy as np

from ..blocks.block_pool import BlockPool
from ..blocks.pins import Pins
from ..values.types import Int32Array, SequenceState
from .sequence_table import SequenceTable


class PinPreemption:
    """Decides for one pool."""

    def __init__(self, sequences: SequenceTable, pool: BlockPool, pins: Pins) -> None:
        self._sequences = sequences
        self._pool = pool
        self._pins = pins

    def could_pins_give_way(self, slot: int | None, num_short: int, hits: Int32Array) -> bool:
        """Whether so many blocks, beside these hits, would come free of pins for a sequence that could not go on otherwise."""
        if not self._pins or num_short <= self._pool.num_fenced:
            return False
        states = self._sequences.states
        holding = np.flatnonzero((states == SequenceState.RUNNING) | (states == SequenceState.LOADING))
        is_alone = all(other == slot for other in holding.tolist())
        return is_alone and self._pins.could_give_way(num_short, hits)

    def make_pins_give_way(self, slot: int, num_short: int, hits: Int32Array) -> bool:
        """The same, done where it can be."""
        gives_way = self.could_pins_give_way(slot, num_short, hits)
        if gives_way:
            self._pins.give_way(num_short, hits)
        return gives_way
