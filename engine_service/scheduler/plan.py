"""What crosses the scheduler's edges: the plan of a step, the cache service's answer, and the work that is granted.

Frozen values of numpy columns. Plan's columns carry the names and the order of the protocol's StepRequest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..values.batch import Batch
from ..values.request import Int32Array, Sequence
from ..values.retention import Retention
from .state.preemption_cost import Preemption
from .state.running import IndexArray

Int64Array = npt.NDArray[np.int64]


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
    preemption: Preemption = Preemption.AUTO
    num_host_blocks: int = 0  # null block included; 0: there is no host tier
    block_bytes: int = 0
    prefix_caching: bool = True
    num_usable_blocks: int = 0  # of the pool
    max_distance: int = 0  # most tokens that the model can tell the places of
    max_retained_len: int = 0  # most tokens of a sequence that gives blocks back
    bound: str = ""  # what makes max_len so short, as people can change it
    retained_bound: str = ""  # the same for max_retained_len

    def max_len_of(self, retention: Retention | None) -> int:
        """Most tokens of a sequence. With retention only what it keeps has to fit the pool and the model's positions."""
        if retention is None or retention.num_tokens > self.max_distance:
            return self.max_len
        fits = retention.num_held_blocks(self.block_size) <= self.num_usable_blocks
        return max(self.max_len, self.max_retained_len) if fits else self.max_len

    def bound_of(self, retention: Retention | None) -> str:
        """What makes that so short, in words; empty where it was not said."""
        return self.bound if self.max_len_of(retention) <= self.max_len else self.retained_bound

    @property
    def num_rows(self) -> int:
        """Sequences that can run at once: each computes a token a step, and is known to the cache service."""
        return min(self.max_running, self.token_budget, self.max_known_sequences)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's items for the cache service, and whom they are about."""

    commit_ids: Int64Array
    commit_lens: Int32Array
    commit_num_new: Int32Array
    commit_tokens: Int32Array
    fork_parents: Int64Array
    fork_children: Int64Array
    fork_lens: Int32Array
    release_ids: Int64Array
    swap_out_ids: Int64Array
    swap_in_ids: Int64Array
    start_ids: Int64Array
    start_max_new: Int32Array
    start_max_hit: Int32Array
    start_may_wait: Int32Array
    reserve_ids: Int64Array
    reserve_min: Int32Array
    reserve_max: Int32Array
    guesses: Mapping[int, Int32Array]  # by row: tokens that may follow, for which reserve_max has room
    commit_rows: IndexArray
    forked: tuple[Sequence, ...]  # each computes its last token: the last reservations are theirs
    released: tuple[Sequence, ...]  # of sequences with a row; release_ids names others too
    swapped_out: tuple[Sequence, ...]
    swapped_in: tuple[Sequence, ...]
    started: tuple[Sequence, ...]
    reserve_rows: IndexArray

    @property
    def is_empty(self) -> bool:
        """Nothing to tell the cache service, nothing to compute."""
        columns = (self.start_ids, self.reserve_ids, self.swap_in_ids)
        return self.only_asks and not any(len(column) for column in columns)

    @property
    def only_asks(self) -> bool:
        """Tells nothing new: if nothing is granted either, the same plan would follow at once."""
        columns = (self.commit_ids, self.fork_parents, self.release_ids, self.swap_out_ids)
        return not any(len(column) for column in columns)


class StepAnswer(Protocol):
    """The part of the client's StepResult that the scheduler learns from."""

    @property
    def fork_results(self) -> Int32Array: ...
    @property
    def swap_out_results(self) -> Int32Array: ...
    @property
    def swap_in_results(self) -> Int32Array: ...
    @property
    def start_results(self) -> Int32Array: ...
    @property
    def start_hits(self) -> Int32Array: ...
    @property
    def start_reserved(self) -> Int32Array: ...
    @property
    def start_num_blocks(self) -> Int32Array: ...
    @property
    def start_block_ids(self) -> Int32Array: ...
    @property
    def reserve_reserved(self) -> Int32Array: ...
    @property
    def new_block_item_idx(self) -> Int32Array: ...
    @property
    def new_block_ids(self) -> Int32Array: ...
    @property
    def update_ids(self) -> Int64Array: ...
    @property
    def update_table_idx(self) -> Int32Array: ...
    @property
    def update_block_ids(self) -> Int32Array: ...
    @property
    def copy_sources(self) -> Int32Array: ...
    @property
    def copy_destinations(self) -> Int32Array: ...
    @property
    def ready_ids(self) -> Int64Array: ...
    @property
    def ready_hits(self) -> Int32Array: ...
    @property
    def ready_reserved(self) -> Int32Array: ...
    @property
    def ready_num_blocks(self) -> Int32Array: ...
    @property
    def ready_block_ids(self) -> Int32Array: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_evictable(self) -> int: ...
    @property
    def num_fenced(self) -> int: ...
    @property
    def num_give_back(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Prompt tokens whose log probabilities are wanted: token_ids [n] at positions first_position .. of a sequence.

    The logits that predict them are the batch's first_logit .. first_logit + n - 1.
    """

    sequence: Sequence
    first_position: int
    token_ids: list[int]
    first_logit: int
    num_top: int


@dataclass(frozen=True, slots=True)
class Task:
    """One sequence's part: num_query tokens behind num_context ones whose K and V were there."""

    sequence: Sequence
    num_context: int
    num_query: int

    @property
    def name(self) -> str:
        return f"{self.sequence.request.request_id}[{self.sequence.index}]"

    def __str__(self) -> str:
        return f"{self.name}: {self.num_query} tokens behind {self.num_context}"


@dataclass(frozen=True, slots=True)
class StepChanges:
    """Who came and went with a step.

    Attributes:
        started: who began with it.
        preempted: who gave its blocks back to be computed again.
        swapped_out, swapped_in: whose K and V, of num_context tokens, went to the host tier, and who asked for them back.
    """

    started: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    swapped_out: tuple[Task, ...]
    swapped_in: tuple[Task, ...]

    @property
    def is_move(self) -> bool:
        return bool(self.preempted or self.swapped_out or self.swapped_in)


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: copies, then the batch, then one token for each of `sampled`, candidates for each of `searched`.

    Attributes:
        rows, num_new: rows of RunningSequences and how many tokens of each are computed, as the batch has them.
        num_prompt_tokens: how many of them are their requests' prompts.
        batch: None when nothing is computed.
        sampled: sequences whose next token is chosen: those of sample_rows, then continuations that wait to be forked,
            whose first tokens come from their prompt's one row of logits.
        guesses: for each of them the guessed tokens that were computed behind its last one; mostly none.
        logit_idx: for each of them the rows of the batch's logits that its next tokens are drawn from, one more than it has
            guesses, concatenated.
        searched, search_idx: lists of beam searches that were computed to their last tokens, and for each the row of the
            batch's logits that the candidates for its next one come from.
        scores: prompt tokens to tell the log probabilities of.
        unfinished, check_idx: sequences whose prompt goes on after this step, and for each the logits of its last token, which
            are not finite if any K or V before them was not: such K and V must not be shared.
        sequences, num_context: of each row, for whoever asks what the step did; context is what was computed before.
        news: who came and went with it.
    """

    rows: IndexArray
    num_new: Int32Array
    num_prompt_tokens: int
    copies: list[tuple[int, int]]
    batch: Batch | None
    sample_rows: IndexArray
    sampled: list[Sequence]
    guesses: list[Int32Array]
    logit_idx: Int64Array
    searched: list[Sequence]
    search_idx: Int64Array
    scores: tuple[PromptScore, ...]
    unfinished: list[Sequence]
    check_idx: Int64Array
    sequences: list[Sequence]
    num_context: Int32Array
    news: StepChanges
