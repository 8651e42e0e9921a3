"""The columns of one step and of its reply.

Arrays are not copied on their way through the core: the caller that hands one over does not write to it again.
"""

from typing import NamedTuple

from .types import NO_INT32, NO_INT64, Int32Array, Int64Array, PressureLevel


class StepBatch(NamedTuple):
    """The items of one Step as columns; fields are those of the protocol's StepRequest.

    A named tuple, as is the reply: a frozen dataclass of so many fields takes four times as long to make.
    """

    step_id: int
    completed_step_id: int
    commit_ids: Int64Array = NO_INT64
    commit_lens: Int32Array = NO_INT32  # absolute
    commit_num_new: Int32Array = NO_INT32
    commit_tokens: Int32Array = NO_INT32  # concatenated
    fork_parents: Int64Array = NO_INT64
    fork_children: Int64Array = NO_INT64
    fork_lens: Int32Array = NO_INT32
    truncate_ids: Int64Array = NO_INT64
    truncate_lens: Int32Array = NO_INT32
    release_ids: Int64Array = NO_INT64
    start_ids: Int64Array = NO_INT64
    start_max_new: Int32Array = NO_INT32
    start_max_hit: Int32Array = NO_INT32
    reserve_ids: Int64Array = NO_INT64
    reserve_min: Int32Array = NO_INT32
    reserve_max: Int32Array = NO_INT32
    completed_transfers: Int64Array = NO_INT64
    failed_transfers: Int64Array = NO_INT64
    swap_out_ids: Int64Array = NO_INT64
    swap_in_ids: Int64Array = NO_INT64
    start_may_wait: Int32Array = NO_INT32  # empty: nobody may


class StepReply(NamedTuple):
    """What a Step answers, as columns; fields are those of the protocol's StepResponse."""

    fork_results: Int32Array
    start_results: Int32Array
    start_hits: Int32Array
    start_reserved: Int32Array
    start_num_blocks: Int32Array
    start_block_ids: Int32Array
    reserve_reserved: Int32Array
    new_block_item_idx: Int32Array
    new_block_ids: Int32Array
    update_ids: Int64Array
    update_table_idx: Int32Array
    update_block_ids: Int32Array
    copy_sources: Int32Array
    copy_destinations: Int32Array
    num_free: int
    num_evictable: int
    num_fenced: int
    pressure: PressureLevel
    revision: int
    num_give_back: int = 0
    start_has_logits: Int32Array = NO_INT32  # empty: no start has
    swap_out_results: Int32Array = NO_INT32
    swap_in_results: Int32Array = NO_INT32
    transfer_ids: Int64Array = NO_INT64
    transfer_kinds: Int32Array = NO_INT32
    transfer_sources: Int32Array = NO_INT32
    transfer_destinations: Int32Array = NO_INT32
    ready_ids: Int64Array = NO_INT64
    ready_hits: Int32Array = NO_INT32
    ready_reserved: Int32Array = NO_INT32
    ready_num_blocks: Int32Array = NO_INT32
    ready_block_ids: Int32Array = NO_INT32
