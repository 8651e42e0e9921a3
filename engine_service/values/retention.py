"""Retention of one request: the first and the last tokens stay readable, the blocks between come back (StreamingLLM).

Follows Xiao et al., arXiv 2309.17453. The arithmetic is the cache service's, which decides: with L committed tokens a block
is given back that holds none of the first num_sink_tokens and none of the last num_window_tokens. Pure.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """num_sink_tokens: 0 or more; num_window_tokens: 1 or more, the query's own included."""

    num_sink_tokens: int
    num_window_tokens: int

    @property
    def num_tokens(self) -> int:
        """Most tokens that a query sees."""
        return self.num_sink_tokens + self.num_window_tokens

    def num_held_blocks(self, block_size: int) -> int:
        """Most blocks that a sequence holds which grows by one token at a time."""
        return -(-self.num_sink_tokens // block_size) + (self.num_window_tokens - 1) // block_size + 2

    def holes(self, num_committed: int, block_size: int) -> range:
        """Table indices that name no block any more; empty while all are held."""
        first = -(-self.num_sink_tokens // block_size)
        return range(first, max(first, (num_committed - self.num_window_tokens) // block_size))

    def may_fork(self, num_committed: int, num_tokens: int, block_size: int) -> bool:
        """Whether the first num_tokens of so many committed ones still have their own window, so that they can be forked."""
        holes = self.holes(num_committed, block_size)
        return not holes or not holes.start * block_size < num_tokens < holes.stop * block_size + self.num_window_tokens
