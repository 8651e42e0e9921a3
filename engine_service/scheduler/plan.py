"""Plan and StepAnswer: what a step asks of the cache service, and what the scheduler learns from the answer.

Frozen values of numpy columns. Plan's columns carry the names of the protocol's StepRequest. Pure.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ..values.request import NO_TOKENS, Int32Array, Sequence
from ..values.step_wait import StepWait
from .running import NO_IDS, IndexArray, Int64Array


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
        columns = (self.start_ids, self.reserve_ids, self.swap_in_ids)
        return self.only_asks and not any(len(column) for column in columns)

    @property
    def only_asks(self) -> bool:
        """Whether the plan reports nothing new: if nothing is granted either, the same plan would follow at once."""
        columns = (self.commit_ids, self.fork_parents, self.release_ids, self.swap_out_ids)
        return not any(len(column) for column in columns)


class StepAnswer(Protocol):
    """The part of the client's StepResult that the scheduler learns from."""

    @property
    def fork_results(self) -> Int32Array: ...
    @property
    def fork_committed(self) -> Int32Array: ...
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
    def new_block_groups(self) -> Int32Array: ...
    @property
    def update_groups(self) -> Int32Array: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_evictable(self) -> int: ...
    @property
    def num_fenced(self) -> int: ...
    @property
    def num_reclaim_hint(self) -> int: ...
