"""The steps of one pool.

Owns the order of things: a step is decided by validate.py and then applied by lifecycle.py and sequence_swap.py, list by list,
as the protocol says. Who may call, and whether a call is a repeat, is lease.py's.
"""

import numpy as np

from ..calls.create import CreateCalls
from ..sequences.session_state import SessionState
from ..tables.inflight_prefix import computing_len
from ..tables.table_base import Grants, StepLog
from ..tiers.sequence_swap import SequenceSwapper
from ..values.errors import InvalidField
from ..values.step_columns import StepBatch, StepReply
from ..values.types import NO_INT32, NO_INT64, Int32Array, Int64Array, ItemResult, SequenceState, SessionId, StartResult
from .reply import int32_of, step_reply, with_moves
from .validate import StepPlan, check_step, has_one_each, has_swaps

_NO_GRANTS = Grants(NO_INT32, NO_INT32, NO_INT32)


class StepApplier(CreateCalls):
    """See the module."""

    def step(self, session: SessionId, batch: StepBatch) -> StepReply:
        """Applies one iteration, in the protocol's order. Raises without a trace; refusals are in the reply."""
        owner = self._owner(session)
        plan = check_step(self.tables.sequences, owner, batch)
        if len(batch.completed_transfers) or len(batch.failed_transfers):
            self._check_report(owner, batch.completed_transfers, batch.failed_transfers)
        owner.step_id = batch.step_id
        owner.complete(self.tables.pool, batch.completed_step_id)
        return self._apply(owner, batch, plan)

    def complete(
        self,
        session: SessionId,
        completed_step_id: int,
        completed_transfers: Int64Array = NO_INT64,
        failed_transfers: Int64Array = NO_INT64,
    ) -> None:
        """All device work of the session up to this step has finished, and these orders have ended. Raises InvalidField."""
        owner = self._owner(session)
        if len(completed_transfers) or len(failed_transfers):
            self._check_report(owner, completed_transfers, failed_transfers).report(completed_transfers, failed_transfers)
            self.revision += 1
        owner.complete(self.tables.pool, completed_step_id)
        self._note_change()

    def _check_report(self, owner: SessionState, completed: Int64Array, failed: Int64Array) -> SequenceSwapper:
        """Who takes a report of orders, which is lawful. Raises InvalidField."""
        swapper = self.tables.swapper
        if swapper is None:
            field = "completed_transfer_ids" if len(completed) else "failed_transfer_ids"
            raise InvalidField("no transfer order was ever issued", field=field)
        swapper.offloader.transfers.check_report(owner, completed, failed)
        return swapper

    def _apply(self, owner: SessionState, batch: StepBatch, plan: StepPlan) -> StepReply:
        tables, log = self.tables, StepLog()
        self.revision += 1
        tables.claims.now = self.now
        if tables.claims.claims:
            tables.claims.pass_time(self.now)
        tables.counters.num_steps += 1
        forks: list[ItemResult] = []
        starts: list[StartResult] = []
        refused: set[int] = set()
        swap_outs = swap_ins = NO_INT32
        swapper = tables.swapper
        if swapper is not None:
            swapper.begin(owner, log.orders)
            if len(batch.completed_transfers) or len(batch.failed_transfers):
                swapper.report(batch.completed_transfers, batch.failed_transfers)
            if swapper.arrived:
                log.ready.extend(swapper.wake(owner))
        if len(plan.commit_slots):
            lens, num_new, tokens = batch.commit_lens, batch.commit_num_new, batch.commit_tokens
            tables.commit(owner, plan.commit_slots, lens, num_new, tokens, one_each=has_one_each(batch))
        if plan.needs_published:
            tables.publisher.publish(told_now=owner)
        if owner.updates:  # before the forks, which copy these entries, also from a sequence that this step releases
            self._tell_updates(owner, log)
        if len(batch.fork_children):
            forks, refused = self._fork_all(owner, batch)
        for sequence_id, num_tokens in zip(batch.truncate_ids.tolist(), batch.truncate_lens.tolist(), strict=True):
            slot = owner.ids.get(sequence_id)
            if slot is not None:
                tables.truncate(owner, slot, num_tokens)
        if len(batch.release_ids):
            slots = [owner.ids.get(sequence_id) for sequence_id in batch.release_ids.tolist()]
            tables.release(owner, [slot for slot in slots if slot is not None])
        if has_swaps(batch):
            swap_outs, swap_ins = self._swap_all(owner, log, batch)
        if len(plan.start_slots):
            starts = self._start_all(owner, log, batch, plan)
        grants = self._reserve_all(owner, log, batch, plan, refused)
        if log.copy_destinations:
            owner.copy(tables.pool, int32_of(log.copy_destinations))
        if swapper is not None:
            swapper.finish(owner)
        num_give_back = 0
        if tables.claims.claims:
            tables.claims.end_step(owner)
            num_give_back = tables.claims.num_give_back(owner)
        pressure = self._note_change()
        reply = step_reply(
            *(tables, log, plan, forks, starts, grants),
            num_give_back=num_give_back,
            pressure=pressure,
            revision=self.revision,
        )
        if owner.logits and len(batch.start_ids):
            held = [owner.logits.get(sequence_id) for sequence_id in batch.start_ids.tolist()]
            has_logits = int32_of([item is not None and item.step_id == owner.step_id for item in held])
            reply = reply._replace(start_has_logits=has_logits if has_logits.any() else NO_INT32)
        if log.orders or log.ready or has_swaps(batch):
            reply = with_moves(reply, tables.sequences, owner, log, swap_outs, swap_ins)
        return reply

    def _fork_all(self, owner: SessionState, batch: StepBatch) -> tuple[list[ItemResult], set[int]]:
        """Results, and the children that there was no slot for: later items that name one do nothing."""
        results: list[ItemResult] = []
        refused: set[int] = set()
        for parent_id, child_id, num_tokens in zip(
            batch.fork_parents.tolist(), batch.fork_children.tolist(), batch.fork_lens.tolist(), strict=True
        ):
            parent = owner.ids.get(parent_id)
            if parent is None or not self.tables.sequences.num_free_slots:
                refused.add(child_id)
                results.append(ItemResult.NO_ROOM)
                continue
            self.tables.fork(parent, child_id, owner, num_tokens)
            results.append(ItemResult.OK)
        return results, refused

    def _tell_updates(self, owner: SessionState, log: StepLog) -> None:
        """Table entries replaced by publishing since the last reply, but for those that have changed again."""
        seqs = self.tables.sequences
        for slots, ids, table_idx, blocks in owner.updates:
            holds = (seqs.ids[slots] == ids) & (seqs.owners[slots] == owner.number)
            holds &= (seqs.states[slots] == SequenceState.RUNNING) & (table_idx * seqs.block_size < seqs.num_reserved[slots])
            holds &= seqs.tables[slots, table_idx] == blocks
            log.update_ids.extend(ids[holds].tolist())
            log.update_table_idx.extend(table_idx[holds].tolist())
            log.update_blocks.extend(blocks[holds].tolist())
        owner.updates.clear()

    def _start(self, owner: SessionState, log: StepLog, slot: int, max_new: int, max_hit: int) -> StartResult:
        if not self.tables.start(owner, log, slot, max_hit, max_new, num_spare=self._num_spare()):
            return StartResult.NO_ROOM
        if self.tables.sequences.states[slot] == SequenceState.LOADING and not self._load_now(owner, log, slot):
            return StartResult.LOADING
        return StartResult.STARTED

    def _load_now(self, owner: SessionState, log: StepLog, slot: int) -> bool:
        """Whether a sequence that was to load runs already, because its orders are run before the answer."""
        swapper = self.tables.swapper
        assert swapper is not None, "a load without a host tier"
        swapper.run_now(owner)
        woken = swapper.wake(owner)
        log.ready.extend(other for other in woken if other != slot)
        return slot in woken

    def _swap_all(self, owner: SessionState, log: StepLog, batch: StepBatch) -> tuple[Int32Array, Int32Array]:
        """Results of the swap-outs and swap-ins: OK also where nothing is to be done. Without a host tier nothing fits.

        A child whose fork was refused has no slot: there was no room for it, and there is none for its swaps.
        """
        swapper, states = self.tables.swapper, self.tables.sequences.states
        outs: list[ItemResult] = []
        ins: list[ItemResult] = []
        for slot in map(owner.ids.get, batch.swap_out_ids.tolist()):
            if slot is None:
                outs.append(ItemResult.NO_ROOM)
                continue
            done = states[slot] != SequenceState.RUNNING or (swapper is not None and swapper.swap_out(owner, slot))
            outs.append(ItemResult.OK if done else ItemResult.NO_ROOM)
            if swapper is not None:
                swapper.run_now(owner)
        for slot in map(owner.ids.get, batch.swap_in_ids.tolist()):
            if slot is None:
                ins.append(ItemResult.NO_ROOM)
                continue
            done = True
            if swapper is not None and states[slot] == SequenceState.SWAPPED:
                done = self._swap_in(owner, swapper, slot)
                if states[slot] == SequenceState.RUNNING or (done and self._load_now(owner, log, slot)):
                    log.ready.append(slot)
            ins.append(ItemResult.OK if done else ItemResult.NO_ROOM)
        return int32_of(outs), int32_of(ins)

    def _swap_in(self, owner: SessionState, swapper: SequenceSwapper, slot: int) -> bool:
        """A swap-in claims as a start does, and leaves alone what is kept for elder sequences."""
        claims, num_apart = self.tables.claims, self._num_spare()
        num_kept = claims.num_kept_from(slot) if claims.claims else 0
        # Blocks that are still on their way out would only be taken back; an elder sequence that misses some has them first.
        is_owed = num_kept > self.tables.pool.num_available and bool(self.tables.sequences.keeps_table[slot])
        done = not is_owed and swapper.swap_in(owner, slot, num_apart + num_kept)
        if done:
            claims.forget(slot)
        else:
            num_missing, num_room = swapper.shortage_in(owner, slot, num_apart)
            claims.refuse(owner, slot, max(1, num_missing + self.tables.pool.num_available - num_room))
        return done

    def _start_all(self, owner: SessionState, log: StepLog, batch: StepBatch, plan: StepPlan) -> list[StartResult]:
        tables = self.tables
        may_wait = batch.start_may_wait if len(batch.start_may_wait) else np.zeros(len(plan.start_slots), np.int32)
        columns = (plan.start_slots, batch.start_max_new, batch.start_max_hit, may_wait)
        owners = {other.number: other for other in self._owners.values()} if may_wait.any() else {}
        results: list[StartResult] = []
        for slot, max_new, max_hit, waits in zip(*(column.tolist() for column in columns), strict=True):
            if waits and (length := computing_len(tables, slot, max_hit, owners)):
                tables.claims.forget(slot)  # it is not for want of blocks that it waits
                tables.counters.num_computing_answers += 1
                log.computing_lens[slot] = length
                results.append(StartResult.COMPUTING)
            else:
                results.append(self._start(owner, log, slot, max_new, max_hit))
        return results

    def _reserve_all(self, owner: SessionState, log: StepLog, batch: StepBatch, plan: StepPlan, refused: set[int]) -> Grants:
        if not len(batch.reserve_ids):
            return _NO_GRANTS
        if plan.reserve_slots is not None:
            return self.tables.reserve(owner, log, plan.reserve_slots, batch.reserve_min, batch.reserve_max)
        there = np.array([sequence_id not in refused for sequence_id in batch.reserve_ids.tolist()])
        slots = owner.ids.find(batch.reserve_ids[there], "reserve_sequence_ids")
        grants = self.tables.reserve(owner, log, slots, batch.reserve_min[there], batch.reserve_max[there])
        reserved = np.zeros(len(there), np.int32)
        reserved[there] = grants.reserved
        return Grants(reserved, np.flatnonzero(there).astype(np.int32)[grants.item_idx], grants.blocks)
