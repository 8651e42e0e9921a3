"""What new entries of a sequence's tables take: the blocks of each group of layers.

Owns the one rule that a group of states adds: of the entries from `start` up to `end` those have a block that are checkpoints,
and the last one; all others are holes. Every other group has a block for each entry. Pure arithmetic of table indices; knows no
sequence and no block.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..values.kv_spec import ReadSpan
from ..values.types import Int32Array, Int64Array


class NewEntries:
    """The blocks that new table entries of groups with these spans take."""

    def __init__(self, spans: Sequence[ReadSpan]) -> None:
        self.num_groups = len(spans)
        self.periods = tuple(span.checkpoint_blocks for span in spans)  # of checkpoints; 0: each entry has a block
        self.state_groups = tuple(group for group, period in enumerate(self.periods) if period)
        self.window_groups = tuple(group for group, span in enumerate(spans) if group and not span.checkpoint_blocks)
        self.common_period = math.lcm(*(self.periods[group] for group in self.state_groups))  # of what a hit may end at
        self._num_dense = self.num_groups - len(self.state_groups)

    @property
    def has_states(self) -> bool:
        return bool(self.state_groups)

    def num_blocks(self, start: int, end: int) -> int:
        """Blocks of all groups that the entries [start, end) take."""
        if end <= start:
            return 0
        periods = (self.periods[group] for group in self.state_groups)
        return (end - start) * self._num_dense + sum(end // k - start // k + (end % k > 0) for k in periods)

    def count_blocks(self, starts: Int32Array, ends: Int32Array) -> Int32Array:
        """[n] the same of several sequences; an end below its start is none."""
        ends = np.maximum(ends, starts)
        total = (ends - starts) * np.int32(self._num_dense)
        for group in self.state_groups:
            k = np.int32(self.periods[group])
            total += ends // k - starts // k + ((ends % k > 0) & (ends > starts))
        return total

    def most_entries(self, start: int, most: int, num_room: int) -> int:
        """How many of up to `most` entries from `start` on fit into so many blocks."""
        if not self.state_groups:
            return min(most, max(num_room, 0) // self.num_groups)
        return max(bisect_right(range(most + 1), num_room, key=lambda count: self.num_blocks(start, start + count)) - 1, 0)

    def have_blocks(self, table_idx: Int32Array, are_last: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """[groups * n] of new entries at table_idx [n], one group behind the other, which have a block.

        are_last: whether each is the last entry of its grant.
        """
        every = np.ones(len(table_idx), np.bool_)
        return np.concatenate([((table_idx + 1) % k == 0) | are_last if k else every for k in self.periods])

    def are_checkpoints(self, group: int, table_idx: Int32Array | Int64Array) -> npt.NDArray[np.bool_]:
        """[n] which of these entries of a group of states are checkpoints."""
        return (table_idx + 1) % self.periods[group] == 0
