"""The batch sizes for which graphs are captured. Pure.

A batch takes the next larger graph, and its padding costs little: a row without tokens reads nothing. So the steps between
sizes are of eight rows, and of sixteen where eight are few beside the others.
"""

import bisect
from collections.abc import Sequence

_SMALL = (1, 2, 4)
_STEP, _WIDE_STEP = 8, 16
_WIDE_FROM = 128
MOST_ROWS = 512  # larger batches keep the device busy for longer than the host needs for a plain forward pass


def graph_sizes(most_rows: int) -> list[int]:
    """Sizes up to `most_rows`, at least 1, itself included, and never above MOST_ROWS. Ascending."""
    most = min(most_rows, MOST_ROWS)
    steps = [*_SMALL, *range(_STEP, _WIDE_FROM, _STEP), *range(_WIDE_FROM, most + 1, _WIDE_STEP)]
    return [size for size in steps if size < most] + [most]


def size_for(num_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending sizes that holds so many rows; None: none does."""
    place = bisect.bisect_left(sizes, num_rows)
    return sizes[place] if place < len(sizes) else None
