"""ReadSpan: which tokens of a sequence a token reads in one group of layers, as the cache service counts them. Pure."""

from dataclasses import dataclass

import numpy as np

from .request import Int32Array


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A token reads the num_tokens up to itself, or those of its chunk of so many; 0: all before it.

    checkpoint_blocks: of a group of states, whose tokens read the state behind the token before them, every so many-th block
    has a state that is kept; 0: the group has K and V of each token.
    """

    num_tokens: int = 0
    is_chunk: bool = False
    checkpoint_blocks: int = 0

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

    def num_held(self, num_committed: Int32Array, num_tokens: Int32Array, block_size: int) -> Int32Array:
        """[n] blocks of sequences with so many tokens in all [n], of which so many are committed [n].

        Of states the most: beside the checkpoints one that is read, and one that is written.
        """
        entries = -(-num_tokens // block_size)
        if self.checkpoint_blocks:
            return np.minimum(entries, entries // self.checkpoint_blocks + 2)
        return entries - self.firsts(num_committed) // block_size

    def num_granted(self, starts: Int32Array, ends: Int32Array) -> Int32Array:
        """[n] blocks that table entries from starts [n] up to ends [n] take, ends not below starts.

        Of states those of checkpoints and of the last entry.
        """
        if (each := self.checkpoint_blocks) == 0:
            return ends - starts
        return ends // each - starts // each + ((ends % each > 0) & (ends > starts))


WHOLE = ReadSpan()
