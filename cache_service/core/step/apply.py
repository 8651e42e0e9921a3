"""The steps of one pool.

Owns the order of things: a step is decided by validate.py and then applied by the parts in tables/ and tiers/, list by list, as
the protocol says. What a step leaves for after its reply is to publish what it committed, see publisher.py. Which session may
call, and whether a call is a repeat, is lease.py's.
"""

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..tables.inflight_prefix import InflightPrefixes
from ..tables.lifecycle import SequenceLifecycle
from ..tables.prompt_watch import PromptWatch
from ..tables.reserve import Reservations
from ..tables.start import SequenceStarter
from ..tables.step_log import Grants, StepLog
from ..tiers.sequence_swap import SequenceSwapper
from ..values.errors import InvalidField
from ..values.step_columns import StepBatch, StepReply
from ..values.types import NO_INT32, NO_INT64, Int64Array, ItemResult, SequenceState, SessionId, StartResult
from .reply import step_reply, to_int32
from .validate import StepPlan, check_step, has_one_each, has_swaps

_RUNNING = np.int8(SequenceState.RUNNING)  # a comparison with the member itself takes several times as long
_NO_GRANTS = Grants(NO_INT32, NO_INT32, NO_INT32)


class StepApplier:
    """Applies the steps of one pool."""

    def __init__(
        self,
        state: PoolState,
        lifecycle: SequenceLifecycle,
        reservations: Reservations,
        starter: SequenceStarter,
        inflight: InflightPrefixes,
        swapper: SequenceSwapper | None,
        prompts: PromptWatch,
    ) -> None:
        self._state = state
        self._sequences = state.sequences
        self._pool = state.pool
        self._claims = state.claims
        self._publisher = state.publisher
        self._counters = state.counters
        self._lifecycle = lifecycle
        self._reservations = reservations
        self._starter = starter
        self._inflight = inflight
        self._swapper = swapper
        self._prompts = prompts

    def step(self, session: SessionId, batch: StepBatch) -> StepReply:
        """Applies one iteration, in the protocol's order. Raises without a trace; refusals are in the reply."""
        owner = self._state.session(session)
        plan = check_step(self._sequences, owner, batch)
        if len(batch.completed_transfers) or len(batch.failed_transfers):
            self._check_report(owner, batch.completed_transfers, batch.failed_transfers)
        owner.step_id = batch.step_id
        owner.complete_steps(self._pool, batch.completed_step_id)
        return self._apply(owner, batch, plan)

    def complete(
        self,
        session: SessionId,
        completed_step_id: int,
        completed_transfers: Int64Array = NO_INT64,
        failed_transfers: Int64Array = NO_INT64,
    ) -> None:
        """All device work of the session up to this step has finished, and these orders have ended. Raises InvalidField."""
        owner = self._state.session(session)
        if len(completed_transfers) or len(failed_transfers):
            swapper = self._check_report(owner, completed_transfers, failed_transfers)
            swapper.report_orders(completed_transfers, failed_transfers)
            self._state.revision += 1
        owner.complete_steps(self._pool, completed_step_id)
        self._state.update_pressure()

    def _check_report(self, owner: SessionState, completed: Int64Array, failed: Int64Array) -> SequenceSwapper:
        """The part that takes a report of orders, which is valid. Raises InvalidField."""
        swapper = self._swapper
        if swapper is None:
            field = "completed_transfer_ids" if len(completed) else "failed_transfer_ids"
            raise InvalidField("no transfer order was ever issued", field=field)
        swapper.offloader.transfers.check_report(owner, completed, failed)
        return swapper

    def _apply(self, owner: SessionState, batch: StepBatch, plan: StepPlan) -> StepReply:
        state, swapper, log = self._state, self._swapper, StepLog()
        self._begin(owner, batch, log)
        if len(plan.commit_slots):
            lens, num_new, tokens = batch.commit_lens, batch.commit_num_new, batch.commit_tokens
            self._lifecycle.commit(owner, plan.commit_slots, lens, num_new, tokens, one_each=has_one_each(batch))
        release_slots = _there(owner, batch.release_ids)
        self._publish(owner, batch, plan, release_slots)
        if owner.updates:  # before the forks, which copy these entries, also from a sequence that this step releases
            self._report_updates(owner, log)
        if len(batch.fork_children):
            self._fork_all(owner, log, batch)
            release_slots = _there(owner, batch.release_ids)  # a child whose fork was refused has no slot
        if len(batch.truncate_ids):
            self._truncate_all(owner, log, batch)
        if release_slots:
            self._lifecycle.release(owner, release_slots, keeps_partial=True)
        if has_swaps(batch):
            self._swap_all(owner, log, batch)
        if len(plan.start_slots):
            self._start_all(owner, log, batch, plan)
        grants = self._reserve_all(owner, log, batch, plan)
        self._note_wishes(plan, grants)
        if log.copy_destinations:
            owner.note_copies(self._pool, to_int32(log.copy_destinations))
        if swapper is not None:
            swapper.finish_call(owner)
        if self._prompts.is_on:
            self._prompts.look()
        num_reclaim_hint = 0
        if self._claims.claims:
            self._claims.forget_unrepeated(owner)
            num_reclaim_hint = self._claims.reclaim_hint(owner)
        pressure = state.update_pressure()
        return step_reply(
            self._sequences,
            self._pool,
            owner,
            batch,
            log,
            plan,
            grants,
            num_reclaim_hint=num_reclaim_hint,
            pressure=pressure,
            revision=state.revision,
        )

    def _begin(self, owner: SessionState, batch: StepBatch, log: StepLog) -> None:
        swapper = self._swapper
        self._state.revision += 1
        self._counters.num_steps += 1
        if self._claims.claims:
            self._claims.forget_stale()
        if swapper is not None:
            swapper.begin_call(owner, log.orders)
            if len(batch.completed_transfers) or len(batch.failed_transfers):
                swapper.report_orders(batch.completed_transfers, batch.failed_transfers)
            if swapper.arrived:
                log.ready.extend(swapper.conclude_arrived(owner))

    def _publish(self, owner: SessionState, batch: StepBatch, plan: StepPlan, release_slots: list[int]) -> None:
        """Publishes as much before the answer as the step asks for."""
        could_hit_more = len(plan.start_slots) and self._starter.could_hit_more(plan.start_slots, batch.start_max_hit)
        if plan.needs_published or could_hit_more:
            self._publisher.publish(reported_now=owner)
        elif release_slots:
            self._publisher.publish_slots(owner, np.array(release_slots), reported_now=owner)

    def _note_wishes(self, plan: StepPlan, grants: Grants) -> None:
        """How many free blocks the step could use, hits of its starts included; steps to come are to find as many."""
        seqs, num_blocks = self._sequences, len(grants.blocks)
        if seqs.has_states:
            num_blocks = int(np.count_nonzero(grants.blocks))
        for slot in plan.start_slots.tolist():
            num_blocks += seqs.new_entries.num_blocks(0, seqs.num_blocks(int(seqs.num_tokens[slot])))
        if num_blocks:
            self._state.room_ahead.note_step(num_blocks)

    def _fork_all(self, owner: SessionState, log: StepLog, batch: StepBatch) -> None:
        """Later items that name a child for which there was no slot do nothing."""
        for parent_id, child_id, num_tokens in zip(
            batch.fork_parents.tolist(), batch.fork_children.tolist(), batch.fork_lens.tolist(), strict=True
        ):
            parent = owner.ids.get(parent_id)
            if parent is None or self._state.slot_limit(owner) is not None:
                log.refused.add(child_id)
                log.forks.append(ItemResult.NO_ROOM)
                log.forked_lens.append(0)
                continue
            child = self._lifecycle.fork(parent, child_id, owner, num_tokens)
            log.forked_lens.append(int(self._sequences.num_committed[child]))
            log.forks.append(ItemResult.OK)

    def _truncate_all(self, owner: SessionState, log: StepLog, batch: StepBatch) -> None:
        for sequence_id, num_tokens in zip(batch.truncate_ids.tolist(), batch.truncate_lens.tolist(), strict=True):
            slot = owner.ids.get(sequence_id)
            if slot is not None:
                self._lifecycle.truncate(owner, slot, num_tokens)
            log.truncated_lens.append(0 if slot is None else int(self._sequences.num_committed[slot]))

    def _report_updates(self, owner: SessionState, log: StepLog) -> None:
        """Table entries replaced by publishing since the last reply, but for those that have changed again."""
        seqs = self._sequences
        for slots, ids, table_idx, blocks in owner.updates:
            holds = (seqs.ids[slots] == ids) & (seqs.owners[slots] == owner.number)
            holds &= (seqs.states[slots] == SequenceState.RUNNING) & (
                table_idx % seqs.max_blocks * seqs.block_size < seqs.num_reserved[slots]
            )
            holds &= seqs.tables.rows[slots, table_idx] == blocks
            log.update_ids.extend(ids[holds].tolist())
            log.update_table_idx.extend(table_idx[holds].tolist())
            log.update_blocks.extend(blocks[holds].tolist())
        owner.updates.clear()

    def _start(self, owner: SessionState, log: StepLog, slot: int, max_new: int, max_hit: int, exact: int) -> StartResult:
        if not self._starter.start(owner, log, slot, max_hit, max_new, num_spare=self._state.num_spare(), exactly=exact):
            return StartResult.NO_ROOM
        if self._swapper is not None and self._sequences.states[slot] == SequenceState.LOADING:
            return StartResult.STARTED if self._load_now(owner, log, slot) else StartResult.LOADING
        return StartResult.STARTED

    def _load_now(self, owner: SessionState, log: StepLog, slot: int) -> bool:
        """Whether a sequence that was to load runs already, because its orders are run before the answer."""
        swapper = self._swapper
        assert swapper is not None, "a load without a host tier"
        swapper.run_now(owner)
        woken = swapper.conclude_arrived(owner)
        log.ready.extend(other for other in woken if other != slot)
        return slot in woken

    def _swap_all(self, owner: SessionState, log: StepLog, batch: StepBatch) -> None:
        """Swaps out, then in: OK also where nothing is to be done. Without a host tier nothing fits.

        A child whose fork was refused has no slot: there was no room for it, and there is none for its swaps.
        """
        swapper, states = self._swapper, self._sequences.states
        for slot in map(owner.ids.get, batch.swap_out_ids.tolist()):
            if slot is None:
                log.swap_outs.append(ItemResult.NO_ROOM)
                continue
            done = states[slot] != SequenceState.RUNNING or (swapper is not None and swapper.swap_out(owner, slot))
            log.swap_outs.append(ItemResult.OK if done else ItemResult.NO_ROOM)
            if swapper is not None:
                swapper.run_now(owner)
        for slot in map(owner.ids.get, batch.swap_in_ids.tolist()):
            if slot is None:
                log.swap_ins.append(ItemResult.NO_ROOM)
                continue
            done = True
            if swapper is not None and states[slot] == SequenceState.SWAPPED:
                done = self._swap_in(owner, swapper, slot)
                if states[slot] == SequenceState.RUNNING or (done and self._load_now(owner, log, slot)):
                    log.ready.append(slot)
            log.swap_ins.append(ItemResult.OK if done else ItemResult.NO_ROOM)

    def _swap_in(self, owner: SessionState, swapper: SequenceSwapper, slot: int) -> bool:
        """A swap-in claims as a start does, and leaves alone the blocks that are reserved for earlier arrivals."""
        claims, num_apart = self._claims, self._state.num_spare()
        num_kept = claims.num_kept_from(slot) if claims.claims else 0
        # Do not cancel a swap-out while an earlier arrival waits for its blocks.
        is_awaited = num_kept > self._pool.num_available and bool(self._sequences.keeps_table[slot])
        done = not is_awaited and swapper.swap_in(owner, slot, num_apart + num_kept)
        if done:
            claims.forget_claim(slot)
        else:
            num_missing, num_room = swapper.shortage_in(owner, slot, num_apart)
            claims.add_claim(owner, slot, max(1, num_missing + self._pool.num_available - num_room))
        return done

    def _start_all(self, owner: SessionState, log: StepLog, batch: StepBatch, plan: StepPlan) -> None:
        is_asked = len(batch.start_may_wait) > 0
        none = np.zeros(len(plan.start_slots), np.int32)
        waiting, exact = (column if len(column) else none for column in (batch.start_may_wait, batch.start_exact))
        columns = (plan.start_slots, batch.start_max_new, batch.start_max_hit, waiting, exact)
        owners = {other.number: other for other in self._state.sessions.values()} if is_asked else {}
        below = self._state.below
        self._inflight.begin_starts()
        for slot, max_new, max_hit, waits, exactly in zip(*(column.tolist() for column in columns), strict=True):
            length = below.length_to_come(slot, max_hit) if waits and below is not None else 0
            if length or (waits and (length := self._inflight.length_to_come(slot, max_hit, owners))):
                self._claims.forget_claim(slot)  # it does not wait for blocks
                self._counters.num_computing_answers += 1
                log.computing_lens[slot] = length
                log.starts.append(StartResult.COMPUTING)
            else:
                num_ready = len(log.ready)
                log.starts.append(self._start(owner, log, slot, max_new, max_hit, exactly))
                has_next = is_asked and len(log.starts) < len(plan.start_slots)
                for other in (slot, *log.ready[num_ready:]) if has_next else ():
                    if self._sequences.states[other] == _RUNNING:
                        self._inflight.note_started(other)

    def _reserve_all(self, owner: SessionState, log: StepLog, batch: StepBatch, plan: StepPlan) -> Grants:
        if not len(batch.reserve_ids):
            return _NO_GRANTS
        if plan.reserve_slots is not None:
            return self._reservations.reserve(owner, log, plan.reserve_slots, batch.reserve_min, batch.reserve_max)
        there = np.array([sequence_id not in log.refused for sequence_id in batch.reserve_ids.tolist()])
        slots = owner.ids.find(batch.reserve_ids[there], "reserve_sequence_ids")
        grants = self._reservations.reserve(owner, log, slots, batch.reserve_min[there], batch.reserve_max[there])
        reserved = np.zeros(len(there), np.int32)
        reserved[there] = grants.reserved
        return Grants(reserved, np.flatnonzero(there).astype(np.int32)[grants.item_idx], grants.blocks, grants.groups)


def _there(owner: SessionState, ids: Int64Array) -> list[int]:
    """Slots of those of these sequences that there are."""
    return [slot for slot in map(owner.ids.get, ids.tolist()) if slot is not None]
