"""Sums over the life of a pool, incremented by the code that does the thing counted."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Sums over the life of a pool; names are those of PoolStats."""

    num_starts: int = 0
    num_look_ups: int = 0
    num_hits: int = 0
    num_look_up_tokens: int = 0
    num_hit_tokens: int = 0
    num_full_hits: int = 0
    num_partial_hits: int = 0
    num_partial_hit_tokens: int = 0
    num_forks: int = 0
    num_copies_on_write: int = 0
    num_adopted_blocks: int = 0
    num_retention_dropped_blocks: int = 0
    num_cleared_blocks: int = 0
    num_steps: int = 0
    num_refusals: int = 0
    num_refused_starts: int = 0
    num_computing_answers: int = 0
    num_collected_blocks: int = 0
    num_hand_offs: int = 0
