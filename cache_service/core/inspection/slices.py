"""Comparisons of whole pools in slices of a millisecond, between which the pool may change.

What must be seen at one moment is copied then. Rule: the memory that it is copied to was touched before, in slices, because
the pages of fresh memory cost several times the copy.
"""

from collections.abc import Callable, Generator, Iterator

import numpy as np

from ..values.types import NO_INT32, Int32Array

SLICE_BLOCKS = 65_536  # or table entries, compared in less than a millisecond


def slices(num_blocks: int) -> Iterator[slice]:
    """All blocks."""
    for start in range(0, num_blocks, SLICE_BLOCKS):
        yield slice(start, min(start + SLICE_BLOCKS, num_blocks))


def compare(
    name: str, num_blocks: int, count: Callable[[slice], np.ndarray], list_rows: Callable[[], list[Int32Array]]
) -> Iterator[list[str]]:
    """Whether the counts of all blocks are those of the entries at one moment.

    count returns those of a slice, which needs little memory; list_rows returns rows of what they count.
    """
    missing, entries = np.empty(num_blocks, np.int32), np.empty(sum(map(len, list_rows())), np.int32)
    yield from _touch(missing)
    yield from _touch(entries)
    for some in slices(num_blocks):
        missing[some] = count(some)
    rows = list_rows()
    num_entries = sum(map(len, rows))
    entries = np.concatenate([NO_INT32, *rows], out=entries[:num_entries] if num_entries <= len(entries) else None)
    yield []
    for some in slices(num_entries):
        np.subtract.at(missing, entries[some], np.int32(1))
        yield []
    for some in slices(num_blocks):
        differ = some.start + np.flatnonzero(missing[some])
        yield [f"block {block} has the wrong number of {name}" for block in differ.tolist()]


def _touch(memory: Int32Array) -> Generator[list[str], None, None]:
    for some in slices(len(memory)):
        memory[some] = 0
        yield []
