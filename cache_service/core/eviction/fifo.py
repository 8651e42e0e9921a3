"""First in, first out, and its second-chance form, the clock.

The key is the turn in which a block came: the number of blocks that came before it, in at most about 256 turns for a whole
pool, so that the queues stay few; in a pool of fewer blocks each sequence has a turn of its own. A parent takes over the turn
of the newest block below it, because evicting the parent first would waste that block.
"""

import numpy as np
import numpy.typing as npt

from ..values.types import Int32Array, Int64Array
from .keyed import UNUSED, KeyedPolicy
from .policy import Use

_TURNS_PER_POOL = 256


class FifoPolicy(KeyedPolicy):
    """The block that was cached first goes first, however often it was used since."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._turn_len = max(1, num_blocks // _TURNS_PER_POOL)
        self._num_arrived = 0

    def _turn(self) -> int:
        return self._num_arrived // self._turn_len

    def _new_keys(self, keys: Int64Array, use: Use) -> Int64Array:
        fresh = keys == UNUSED
        self._num_arrived += int(np.count_nonzero(fresh))
        return np.where(fresh, np.int64(self._turn()), keys)


class ClockPolicy(FifoPolicy):
    """Oldest first, but a block that was used again since it came, or since it was last passed over, gets another turn.

    A use marks a block with all its ancestors, and a parent is passed over after its children; so the parent of a marked
    block is marked, and goes to the end of the queue behind it. (Corbato, "A Paging Experiment with the Multics System", 1968.)
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._used_again: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)

    def _forget_past(self, blocks: Int32Array) -> None:
        super()._forget_past(blocks)
        self._used_again[blocks] = False

    def _new_keys(self, keys: Int64Array, use: Use) -> Int64Array:
        self._used_again[use.blocks] = keys != UNUSED
        return super()._new_keys(keys, use)

    def _pop_lowest(self, count: int) -> Int32Array:
        popped = super()._pop_lowest(count)
        again = self._used_again[popped]
        spared = popped[again]
        if len(spared):
            self._used_again[spared] = False
            self._num_arrived += len(spared)
            self._keys[spared] = self._turn()
            self._push(spared, self._keys[spared])
        return popped[~again]
