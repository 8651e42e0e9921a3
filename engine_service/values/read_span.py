"""ReadSpan: which tokens of a sequence a token reads in one group of layers, as the cache service counts them. Pure."""

from dataclasses import dataclass

import numpy as np

from .request import Int32Array


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A token reads the num_tokens up to itself, or those of its chunk of so many; 0: all before it."""

    num_tokens: int = 0
    is_chunk: bool = False

    def firsts(self, positions: Int32Array) -> Int32Array:
        """[n] the first tokens that those at these positions [n] read."""
        if not self.num_tokens:
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
        """The first position that reads nothing before token `first`."""
        if self.is_chunk:
            return -(-first // self.num_tokens) * self.num_tokens
        return first + self.num_tokens - 1 if first else 0


WHOLE = ReadSpan()
