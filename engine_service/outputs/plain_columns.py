"""PlainColumns: plain tokens of many requests, by column, as they go to those who write them. Pure."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class PlainColumns(NamedTuple):
    """Tokens of P requests: the numbers that their reader knows them by, how many each has, and all, one behind the other."""

    numbers: npt.NDArray[np.uint64]  # [P]
    counts: npt.NDArray[np.int64]  # [P]
    token_ids: npt.NDArray[np.int32]  # [sum of counts]

    def split(self, most: int) -> Iterator["PlainColumns"]:
        """The same in pieces of whole requests, of about so many tokens."""
        ends = np.cumsum(self.counts)
        edges = [*np.flatnonzero(np.diff((ends - 1) // most, prepend=-1)).tolist(), len(ends)]
        for first, end in pairwise(edges):
            tokens = self.token_ids[ends[first] - self.counts[first] : ends[end - 1]]
            yield PlainColumns(self.numbers[first:end], self.counts[first:end], tokens)


NO_COLUMNS = PlainColumns(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int32))
