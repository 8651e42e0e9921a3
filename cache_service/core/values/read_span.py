"""ReadSpan: which tokens of a sequence a token reads in one group of layers.

Owns the arithmetic of full attention, sliding windows and chunks, which differ in the first token that is read and in nothing
else: what is before it is given back, and a hit does without it. Pure; positions are numbers or arrays of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .types import Int32Array, Int64Array

_Positions = TypeVar("_Positions", Int32Array, Int64Array)


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A token reads the num_tokens up to itself, or those of its chunk of so many; 0: all before it."""

    num_tokens: int = 0
    is_chunk: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all tokens are read, so that nothing is ever left behind."""
        return not self.num_tokens

    def firsts(self, positions: _Positions) -> _Positions:
        """[n] the first tokens that those at these positions [n] read."""
        if self.is_whole:
            return np.zeros_like(positions)
        if self.is_chunk:
            return positions // self.num_tokens * self.num_tokens
        return np.maximum(positions - self.num_tokens + 1, 0)

    def first(self, position: int) -> int:
        """The same of one position."""
        if self.is_chunk:
            return position // self.num_tokens * self.num_tokens
        return max(position - self.num_tokens + 1, 0) if self.num_tokens else 0

    def least_position(self, first: int) -> int:
        """The first position that reads nothing before token `first`. Not of a whole span."""
        if self.is_chunk:
            return -(-first // self.num_tokens) * self.num_tokens
        return first + self.num_tokens - 1 if first else 0

    def most_blocks(self, block_size: int) -> int:
        """Most blocks that are held of a sequence that grows by one token at a time. Not of a whole span."""
        return (self.num_tokens - 1) // block_size + 2


WHOLE = ReadSpan()


def spans_of(*windows: int) -> tuple[ReadSpan, ...]:
    """Of groups with these windows in tokens, 0 for all."""
    return tuple(ReadSpan(window) for window in windows)


def first_reads(spans: Sequence[ReadSpan], positions: _Positions) -> _Positions:
    """[n, groups] the first token that each position [n] reads in each group. Groups mostly have one or two spans."""
    found = {span: span.firsts(positions) for span in dict.fromkeys(spans)}
    return np.stack([found[span] for span in spans], 1)
