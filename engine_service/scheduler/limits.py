"""Limits: what the scheduler may do on its pool, and what groups of layers read of a sequence, anew for each session. Pure."""

from dataclasses import dataclass
from math import lcm

import numpy as np

from ..values.request import Int32Array, Retention
from .headroom import Preemption


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


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler may do."""

    block_size: int
    max_len: int  # most tokens of one sequence, so few that one alone always fits the pool
    max_known_sequences: int  # that the pool can know at once
    max_running: int = 256
    token_budget: int = 4096  # tokens of a step
    chunk_size: int = 512
    prefill_budget: int = 2048  # of them, those of prompts, and those that are computed again after a preemption
    decode_budget: int = 256  # sequences that decode in a step
    client_shares: bool = False  # whether clients with many sequences wait for those with few
    preemption: Preemption = Preemption.AUTO
    num_host_blocks: int = 0  # null block included; 0: there is no host tier
    block_bytes: int = 0
    prefix_caching: bool = True
    takes_partial: bool = False  # whether a sequence that ends leaves its last, partly filled blocks, states included
    num_usable_blocks: int = 0  # of the pool
    group_spans: tuple[ReadSpan, ...] = (WHOLE,)  # what each group of layers reads
    has_tail: bool = False  # whether the groups behind the first are finer copies, which a sequence does without
    max_distance: int = 0  # most tokens that the model has positions for
    max_retained_len: int = 0  # most tokens of a sequence that gives blocks back
    max_step_items: int = 256  # forks, releases, swaps and starts of a step, together
    bound: str = ""  # what makes max_len so short, as people can change it
    retained_bound: str = ""  # the same for max_retained_len

    def get_max_len(self, retention: Retention | None) -> int:
        """Most tokens of a sequence. With retention only what it keeps has to fit the pool and the model's positions."""
        if retention is None or retention.num_tokens > self.max_distance:
            return self.max_len
        fits = retention.num_held_blocks(self.block_size) <= self.num_usable_blocks
        return max(self.max_len, self.max_retained_len) if fits else self.max_len

    @property
    def num_groups(self) -> int:
        return len(self.group_spans)

    @property
    def has_states(self) -> bool:
        """Whether groups of layers keep states instead of tokens."""
        return any(span.checkpoint_blocks for span in self.group_spans)

    @property
    def hit_unit(self) -> int:
        """Tokens of which a hit's length is a multiple."""
        return self.block_size * lcm(*(span.checkpoint_blocks or 1 for span in self.group_spans))

    def num_held(self, num_committed: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """[n] blocks of all groups of sequences with so many tokens [n], of which so many are committed [n]."""
        held = [span.num_held(num_committed, num_tokens, self.block_size) for span in self.group_spans]
        return np.sum(held, axis=0, dtype=np.int32)

    def num_granted(self, num_entries: Int32Array, num_tokens: Int32Array) -> int:
        """Blocks of all groups that sequences with tables of so many entries [n] take to have so many tokens [n]."""
        ends = np.maximum(-(-num_tokens // self.block_size), num_entries)
        return sum(int(span.num_granted(num_entries, ends).sum()) for span in self.group_spans)

    def may_cut(self, num_committed: int, num_tokens: int) -> bool:
        """Whether a sequence with so many committed tokens keeps what its first num_tokens read next, states aside."""
        if self.has_tail:
            return True
        size = self.block_size
        spans = (span for span in self.group_spans if not span.checkpoint_blocks)
        ends = ((span.first(num_committed) // size, span) for span in spans)
        return all(not end or num_tokens >= span.least_position(end * size) for end, span in ends)

    def describe_bound(self, retention: Retention | None) -> str:
        """What makes that so short, in words; empty where it was not said."""
        return self.bound if self.get_max_len(retention) <= self.max_len else self.retained_bound

    @property
    def num_rows(self) -> int:
        """Sequences that can run at once: each computes a token a step, and is known to the cache service."""
        return min(self.max_running, self.token_budget, self.max_known_sequences)
