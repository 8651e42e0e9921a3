"""Limits: what the scheduler may do on the pool that it runs on. A frozen value, made anew for each session."""

from dataclasses import dataclass

from ...values.read_span import WHOLE, ReadSpan
from ...values.request import Int32Array
from ...values.retention import Retention
from .preemption_cost import Preemption


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
    num_usable_blocks: int = 0  # of the pool
    group_spans: tuple[ReadSpan, ...] = (WHOLE,)  # what each group of layers reads
    has_tail: bool = False  # whether the groups behind the first are finer copies, which a sequence does without
    max_distance: int = 0  # most tokens that the model has positions for
    max_retained_len: int = 0  # most tokens of a sequence that gives blocks back
    bound: str = ""  # what makes max_len so short, as people can change it
    retained_bound: str = ""  # the same for max_retained_len

    def max_len_of(self, retention: Retention | None) -> int:
        """Most tokens of a sequence. With retention only what it keeps has to fit the pool and the model's positions."""
        if retention is None or retention.num_tokens > self.max_distance:
            return self.max_len
        fits = retention.num_held_blocks(self.block_size) <= self.num_usable_blocks
        return max(self.max_len, self.max_retained_len) if fits else self.max_len

    @property
    def num_groups(self) -> int:
        return len(self.group_spans)

    def hole_ends(self, num_committed: Int32Array) -> list[Int32Array]:
        """Of each group the blocks [n] that its window has left behind, where so many tokens [n] are committed."""
        return [span.firsts(num_committed) // self.block_size for span in self.group_spans]

    def may_cut(self, num_committed: int, num_tokens: int) -> bool:
        """Whether a sequence with so many committed tokens keeps what its first num_tokens read next."""
        if self.has_tail:
            return True
        size = self.block_size
        ends = ((span.first(num_committed) // size, span) for span in self.group_spans)
        return all(not end or num_tokens >= span.least_position(end * size) for end, span in ends)

    def bound_of(self, retention: Retention | None) -> str:
        """What makes that so short, in words; empty where it was not said."""
        return self.bound if self.max_len_of(retention) <= self.max_len else self.retained_bound

    @property
    def num_rows(self) -> int:
        """Sequences that can run at once: each computes a token a step, and is known to the cache service."""
        return min(self.max_running, self.token_budget, self.max_known_sequences)
