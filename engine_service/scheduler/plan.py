"""The values of one step: Plan, which it asks of the cache service, and Work, which it computes once the answer is there.

Frozen values of numpy columns; StepWait says why a step waits. Plan's columns carry the names of the protocol's StepRequest.
Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..values.batch import Batch
from ..values.request import NO_TOKENS, Int32Array, Sequence
from .running import NO_IDS, IndexArray, Int64Array

if TYPE_CHECKING:
    from kvkeeper.client.steps import StepResult

StepAnswer: TypeAlias = "StepResult"  # known by its type alone: its columns and numbers are what the scheduler learns from


class StepWait(StrEnum):
    """Why a step waited, or some of its sequences did, where it could have run; the value is the metric's label.

    docs/operate/why-a-step-waits.md explains each.

    Most steps have none: they are asked for while the step before is computed, and are launched behind it.
    """

    # It was planned once the step before was computed.
    GUESSES = "guesses"
    LEAVING_REQUESTS = "leaving_requests"
    # It was planned meanwhile, and launched once the tokens of the step before were read.
    OVERLAP_OFF = "overlap_off"
    TRANSFERS = "transfers"
    CLAIMS = "claims"
    BLOCKS = "blocks"  # also where some sequences are left out for want of them
    BEAM_SEARCHES = "beam_searches"
    CONSTRAINTS = "constraints"
    # Its forward pass waits on the device.
    COPIES = "copies"
    # Some of its sequences wait for a later one.
    SHARES = "shares"
    TURNS = "turns"
    FORKS = "forks"
    # Its tokens are not used yet.
    LEASE = "lease"
    # It computes nothing, and the next one comes a little later.
    NOTHING_GRANTED = "nothing_granted"


class Plan(NamedTuple):
    """One step's items for the cache service, and the sequences that they are about."""

    commit_ids: Int64Array
    commit_lens: Int32Array
    commit_num_new: Int32Array
    commit_tokens: Int32Array
    commit_rows: IndexArray
    reserve_ids: Int64Array
    reserve_min: Int32Array
    reserve_max: Int32Array
    reserve_rows: IndexArray
    guesses: Mapping[int, Int32Array]  # by row: tokens that may follow; reserve_max counts them
    # What comes and goes. Most steps have none of it.
    fork_parents: Int64Array = NO_IDS
    fork_children: Int64Array = NO_IDS
    fork_lens: Int32Array = NO_TOKENS
    release_ids: Int64Array = NO_IDS
    swap_out_ids: Int64Array = NO_IDS
    swap_in_ids: Int64Array = NO_IDS
    start_ids: Int64Array = NO_IDS
    start_max_new: Int32Array = NO_TOKENS
    start_max_hit: Int32Array = NO_TOKENS
    start_may_wait: Int32Array = NO_TOKENS
    forked: tuple[Sequence, ...] = ()  # each computes its last token: the last reservations are theirs
    released: tuple[Sequence, ...] = ()  # of sequences with a row; release_ids names others too
    swapped_out: tuple[Sequence, ...] = ()
    swapped_in: tuple[Sequence, ...] = ()
    started: tuple[Sequence, ...] = ()
    waits: tuple[StepWait, ...] = ()  # why sequences that could compute are left out

    @property
    def is_empty(self) -> bool:
        """Nothing to report to the cache service, nothing to compute."""
        return not (len(self.reserve_ids) or len(self.start_ids) or len(self.swap_in_ids)) and self.only_asks

    @property
    def only_asks(self) -> bool:
        """Whether the plan reports nothing new: if nothing is granted either, the same plan would follow at once."""
        return not (len(self.commit_ids) or len(self.fork_parents) or len(self.release_ids) or len(self.swap_out_ids))


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Prompt tokens whose log probabilities are requested: token_ids [n] at positions first_position .. of a sequence.

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


# The new tokens of each of a step's sampled sequences; [S, 1] where each of them has one.
NewTokens = list[Int32Array] | Int32Array


@dataclass(frozen=True, slots=True)
class StepChanges:
    """The sequences that came and went with a step.

    Attributes:
        started: they begin with it.
        preempted: they gave their blocks back, and are computed again.
        swapped_out: their K and V, of num_context tokens, went to the host tier.
        swapped_in: they asked for these K and V back.
    """

    started: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    swapped_out: tuple[Task, ...]
    swapped_in: tuple[Task, ...]

    @property
    def is_move(self) -> bool:
        return bool(self.preempted or self.swapped_out or self.swapped_in)


NO_CHANGES = StepChanges((), (), (), ())


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: copies, then the batch, then one token for each of `sampled`, candidates for each of `searched`.

    Attributes:
        rows, num_new: rows of RunningSequences and how many tokens of each are computed, as the batch has them.
        serials: of the rows, which show whether they still have these sequences.
        num_prompt_tokens: how many of them are their requests' prompts.
        batch: None when nothing is computed.
        sampled: sequences whose next token is chosen: those of sample_rows, then continuations that wait to be forked,
            whose first tokens come from their prompt's one row of logits.
        awaited: for each of sample_rows, whether the step before draws the last token that it computes: in a step that runs
            ahead, the host does not know that token yet.
        guesses: for each of them the guessed tokens that were computed behind its last one; mostly none.
        logit_idx: for each of them the rows of the batch's logits that its next tokens are drawn from, one more than it has
            guesses, concatenated.
        searched, search_idx: lists of beam searches that were computed to their last tokens, and for each the row of the
            batch's logits that the candidates for its next one come from.
        scores: prompt tokens whose log probabilities are returned.
        unfinished, check_idx: sequences whose prompt goes on after this step, and for each the logits of its last token, which
            are not finite if any K or V before them was not: such K and V must not be shared.
        sequences, num_context: of each row, to report what the step did; context is what was computed before.
        changes: the sequences that came and went with it.
    """

    rows: IndexArray
    num_new: Int32Array
    serials: Int64Array
    num_prompt_tokens: int
    copies: list[tuple[int, int]]
    batch: Batch | None
    sample_rows: IndexArray
    awaited: npt.NDArray[np.bool_]
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
    changes: StepChanges

    @property
    def num_tokens(self) -> int:
        """How many are computed."""
        return 0 if self.batch is None else len(self.batch.token_ids)
