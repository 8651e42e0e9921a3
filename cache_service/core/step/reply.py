"""The reply of a step, as columns, from the step's log."""

from collections.abc import Sequence

import numpy as np

from ..blocks.block_pool import BlockPool
from ..sequences.sequence_table import SequenceTable
from ..sequences.session_state import SessionState
from ..tables.step_log import Grants, StepLog
from ..tiers.transfers import TransferOrder
from ..values.copies import Copies
from ..values.step_columns import StepBatch, StepReply
from ..values.types import NO_INT32, NO_INT64, Int32Array, PressureLevel, SequenceState, StartResult
from .validate import StepPlan, has_swaps


def step_reply(
    seqs: SequenceTable,
    pool: BlockPool,
    owner: SessionState,
    batch: StepBatch,
    log: StepLog,
    plan: StepPlan,
    grants: Grants,
    *,
    num_reclaim_hint: int,
    pressure: PressureLevel,
    revision: int,
) -> StepReply:
    """The reply of the step that was just applied."""
    # A start that was refused holds nothing, so its row is zeros by itself. A loading start is reported when its blocks are
    # there.
    tables = [seqs.tables.get_from(slot, 0) for slot in plan.start_slots.tolist()]
    update_groups, update_table_idx = NO_INT32, to_int32(log.update_table_idx)
    if seqs.num_groups > 1 and len(update_table_idx):
        update_groups, update_table_idx = np.divmod(update_table_idx, np.int32(seqs.max_blocks))
    reserved = seqs.num_reserved[plan.start_slots] if tables else NO_INT32
    if StartResult.LOADING in log.starts:
        is_loading = [result is StartResult.LOADING for result in log.starts]
        tables = [NO_INT32 if loads else table for table, loads in zip(tables, is_loading, strict=True)]
        reserved[is_loading] = 0
    hits = seqs.num_hit[plan.start_slots] if tables else NO_INT32
    if log.computing_lens:
        lens = log.computing_lens
        hits = to_int32([lens.get(slot, hit) for slot, hit in zip(plan.start_slots.tolist(), hits.tolist(), strict=True)])
    reply = StepReply(
        fork_results=to_int32(log.forks),
        start_results=to_int32(log.starts),
        start_hits=hits,
        start_reserved=reserved,
        start_num_blocks=to_int32([len(table) // seqs.num_groups for table in tables]),
        start_block_ids=np.concatenate(tables) if tables else NO_INT32,
        reserve_reserved=grants.reserved,
        new_block_item_idx=grants.item_idx,
        new_block_ids=grants.blocks,
        update_ids=np.array(log.update_ids, np.int64) if log.update_ids else NO_INT64,
        update_table_idx=update_table_idx,
        update_block_ids=to_int32(log.update_blocks),
        copy_sources=to_int32(log.copy_sources),
        copy_destinations=to_int32(log.copy_destinations),
        num_free=len(pool.free),
        num_evictable=pool.num_evictable,
        num_fenced=pool.num_fenced,
        pressure=pressure,
        revision=revision,
        num_reclaim_hint=num_reclaim_hint,
        new_block_groups=grants.groups,
        update_groups=update_groups,
    )
    if seqs.has_states and (log.forked_lens or log.truncated_lens):
        reply = reply._replace(fork_committed=to_int32(log.forked_lens), truncate_committed=to_int32(log.truncated_lens))
    if owner.logits and tables:
        reply = reply._replace(start_has_logits=_has_logits(owner, batch))
    if log.orders or log.ready or has_swaps(batch):
        reply = _with_moves(reply, seqs, owner, log)
    return reply


def _has_logits(owner: SessionState, batch: StepBatch) -> Int32Array:
    held = [owner.logits.get(sequence_id) for sequence_id in batch.start_ids.tolist()]
    has_logits = to_int32([item is not None and item.step_id == owner.step_id for item in held])
    return has_logits if has_logits.any() else NO_INT32


def _with_moves(reply: StepReply, seqs: SequenceTable, owner: SessionState, log: StepLog) -> StepReply:
    """The reply with what only few have: results of swaps, orders, sequences that run now."""
    # What was released or swapped out again in this very step is not reported.
    ready = [slot for slot in dict.fromkeys(log.ready) if seqs.states[slot] == SequenceState.RUNNING]
    ready = [slot for slot in ready if seqs.owners[slot] == owner.number]
    tables = [seqs.tables.get_from(slot, 0) for slot in ready]
    kinds, sources, destinations = order_columns(log.orders)
    return reply._replace(
        swap_out_results=to_int32(log.swap_outs),
        swap_in_results=to_int32(log.swap_ins),
        transfer_ids=np.array([order.id for order in log.orders], np.int64),
        transfer_kinds=kinds,
        transfer_sources=sources,
        transfer_destinations=destinations,
        ready_ids=seqs.ids[ready],
        ready_hits=seqs.num_hit[ready],
        ready_reserved=seqs.num_reserved[ready],
        ready_num_blocks=to_int32([len(table) // seqs.num_groups for table in tables]),
        ready_block_ids=np.concatenate([NO_INT32, *tables]),
    )


def to_int32(values: Sequence[int]) -> Int32Array:
    """An array; the empty one is shared, because most lists of most steps are empty."""
    return np.array(values, np.int32) if values else NO_INT32


def list_copies(reply: StepReply) -> Copies:
    """The copies and transfers that a step wants to have run."""
    transfers = (reply.transfer_kinds, reply.transfer_sources, reply.transfer_destinations)
    return Copies(reply.copy_sources, reply.copy_destinations, *transfers)


def order_columns(orders: list[TransferOrder]) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Kinds, sources and destinations [n] of transfer orders."""
    kinds, sources = to_int32([order.kind for order in orders]), to_int32([order.source for order in orders])
    return kinds, sources, to_int32([order.destination for order in orders])
