"""One pool's sessions and steps.

Owns the order of things: a step is decided by step.py and then applied by block_tables.py, list by list, as the protocol
says. Also what a session leaves behind when it ends: its cached blocks, and the quarantine of what it may still write. Who
may call, and whether a call is a repeat, is session.py's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cache_service.block_tables import BlockTables, Grants, StepLog
from cache_service.computing import computing_len
from cache_service.errors import DuplicateSequence, InvalidField, NeverFits, OutOfSequences, UnknownSession
from cache_service.owner import Owner
from cache_service.prefix_index import MAX_TENANTS
from cache_service.pressure import PressureGauge
from cache_service.progress import StartNumbers
from cache_service.publishing import ALL_BLOCKS
from cache_service.reclaim import Reclaim
from cache_service.step import StepPlan, check_id, check_step, has_one_each, has_swaps
from cache_service.swapping import Swapping
from cache_service.types import (
    NO_INT32,
    NO_INT64,
    Executor,
    Int32Array,
    Int64Array,
    ItemResult,
    PoolConfig,
    PressureLevel,
    SequenceArgs,
    SequenceState,
    SessionId,
    StartResult,
    StepBatch,
    StepReply,
)

_TICK_BLOCKS = 512  # forgotten in one go
_NO_GRANTS = Grants(NO_INT32, NO_INT32, NO_INT32)


class CloseResult(NamedTuple):
    """What the end of a session did."""

    num_released_sequences: int
    num_quarantined_blocks: int


class StepCore:
    """See the module. Raises InvalidField for a configuration that cannot work."""

    def __init__(self, config: PoolConfig, start_numbers: StartNumbers | None = None) -> None:
        """start_numbers: of the whole service; a pool alone has its own."""
        for name, least in (("num_blocks", 2), ("block_size", 1), ("max_sequences", 1), ("max_tokens_per_sequence", 1)):
            if getattr(config, name) < least:
                raise InvalidField(f"{name} is {least} or more", field=name, limit=least)
        if not 0 <= config.watermark < 1:
            raise InvalidField("watermark is a share from 0 to below 1", field="watermark", limit=1)
        if config.num_host_blocks and config.num_host_blocks < 2:
            raise InvalidField("num_host_blocks is 0, or 2 or more", field="num_host_blocks", limit=2)
        if not 0 < config.evict_above <= 1:
            raise InvalidField("evict_above is a share above 0 and up to 1", field="evict_above", limit=1)
        self.config = config
        self.gauge = PressureGauge(config.pressure_levels, config.num_usable_blocks)
        self._start_numbers = start_numbers or StartNumbers()
        self.tables = BlockTables(config)
        self.reclaim = Reclaim(self.tables)
        self.gauge.on_change = self._tell_pressure
        self._owners: dict[SessionId, Owner] = {}
        self._next_owner = 1
        self._quarantines: dict[SessionId, Int32Array] = {}
        self._num_spare_blocks = int(config.num_usable_blocks * config.watermark)
        self.revision = 0

    @property
    def now(self) -> float:
        """Seconds of a monotone clock, set by whoever calls before the call."""
        return self.tables.index.gone.now

    @now.setter
    def now(self, seconds: float) -> None:
        self.tables.index.gone.now = seconds

    def tick(self) -> bool:
        """What falls due by itself; called about once a second while the pool stands, after `now` was set.

        Does as much as takes about a millisecond; whether more is left.
        """
        pool, limits = self.tables.pool, self.tables.pool.limits
        self.revision += self.tables.pins.expire(self.now) > 0
        self.tables.progress.pass_time(self.now)
        if not limits.is_on:
            self._note_change()
            return False
        before = len(self.tables.index)
        is_left = limits.expire(pool, _TICK_BLOCKS) | limits.enforce(pool, _TICK_BLOCKS)
        if self.tables.swapping is not None:
            host = self.tables.swapping.host.pool
            is_left |= host.limits.expire(host, _TICK_BLOCKS)
        self.revision += len(self.tables.index) != before
        self._note_change()
        return is_left

    def publish_pending(self, max_blocks: int | None = None) -> bool:
        """Publishes up to max_blocks of what steps have committed, all by default; whether more is left.

        Then it evicts as much of what is above the cache's limits.

        A step that only commits and reserves leaves this to its caller, who answers first. What it replaces in tables their
        sessions hear of in their next reply. When nothing is left, the eviction policy does what it put off.
        """
        tables, num_most = self.tables, ALL_BLOCKS if max_blocks is None else max_blocks
        is_left = self._publish(num_most)
        if tables.pool.limits.is_on:
            is_left |= tables.pool.limits.enforce(tables.pool, num_most)
        if not is_left:
            tables.pool.policy.prepare()
        return is_left

    def _publish(self, max_blocks: int = ALL_BLOCKS) -> bool:
        self.tables.sequences.settle()
        is_left = self.tables.publisher.publish(max_blocks)
        self._note_change()
        return is_left

    # Sessions

    def open_session(self, session: SessionId, executor: Executor) -> None:
        assert session not in self._owners, "a session id is drawn once"
        self._owners[session] = Owner(self._next_owner, session, executor)
        self._next_owner += 1

    def close_session(self, session: SessionId, *, may_still_write: bool) -> CloseResult:
        """Ends a session. Full committed blocks stay cached; what it may still write is kept from reuse.

        Of a large one, some is left for `reclaim_some`.
        """
        owner = self._owner(session)
        self.revision += 1
        self._publish()
        ids, slots = owner.ids.items()
        pool, fences = self.tables.pool, owner.fenced_blocks()
        owner.fences.clear()
        blocks = np.concatenate([NO_INT32, *(self._writable_blocks(slot) for slot in slots.tolist())])
        if owner.executor is Executor.ENGINE:  # it may have ended before it ran its last copies, clears among them
            self.tables.distrust(np.concatenate([blocks, fences]))
        if may_still_write:
            # No step writes an indexed block (R5), and what the session's steps still read matters to nobody any more.
            blocks, is_cached = blocks[~pool.indexed[blocks]], pool.indexed[fences]
            pool.quarantine(blocks, fences=fences[~is_cached])
            self._quarantines[session] = np.concatenate([blocks, fences[~is_cached]])
            fences = fences[is_cached]
        pool.lift_fences(fences)
        owner.step_id = owner.completed_step_id  # what is dropped now waits for the quarantine, not for a step
        self.tables.progress.forget_all(slots)
        self.reclaim.end(owner)
        self.tables.pins.end_of(session)
        if self.tables.swapping is not None:
            self._end_transfers(owner, may_still_write=may_still_write)
        del self._owners[session]
        self._note_change()
        return CloseResult(len(ids), self.tables.pool.num_distinct(self._quarantines.get(session, NO_INT32)))

    def reclaim_some(self, max_blocks: int) -> bool:
        """Gives back about so many blocks of sessions that ended. Whether any are left."""
        is_left = self.reclaim.some(max_blocks)
        self._note_change()
        return is_left

    def end_quarantine(self, session: SessionId) -> int:
        """The ended session can write no more: blocks that came free; 0 for a session not in quarantine."""
        if self.tables.swapping is not None:
            self.tables.swapping.end_quarantine(session)
        blocks = self._quarantines.pop(session, None)
        if blocks is None:
            return 0
        self.revision += 1
        num_freed = self.tables.pool.end_quarantine(blocks)
        self._note_change()
        return num_freed

    @property
    def num_sessions(self) -> int:
        return len(self._owners)

    # The hot path

    def create_sequence(self, session: SessionId, args: SequenceArgs) -> int:
        """Stores a prompt, to wait without blocks. Answers the tokens cached right now. Equal arguments again: no change."""
        owner, seqs = self._owner(session), self.tables.sequences
        sequence_id = check_id(args.sequence_id, "sequence_id")
        num_tokens, limit = len(args.token_ids), self.config.limit_with(args.retention)
        if num_tokens < 1 or int(args.token_ids.min()) < 0:
            raise InvalidField("a prompt is 1 token or more, ids 0 to 2^31 - 1", field="token_ids", limit=2**31 - 1)
        max_tokens = args.max_tokens or limit
        if max_tokens > limit or num_tokens > limit:
            requested = max(max_tokens, num_tokens)
            raise NeverFits(f"{requested} tokens, at most {limit} fit", requested=requested, limit=limit)
        if max_tokens < num_tokens:
            raise InvalidField("max_tokens is less than the prompt", field="max_tokens", limit=num_tokens)
        if not 0 <= args.start_number <= self._start_numbers.last:
            limit = self._start_numbers.last
            raise InvalidField("not a place that was given out before", field="start_number", limit=limit)
        slot = owner.ids.get(sequence_id)
        if slot is not None:
            if not self._is_same(slot, args, max_tokens):
                raise DuplicateSequence(f"sequence {sequence_id} exists", sequence_id=sequence_id)
        else:
            if not seqs.num_free_slots:
                limit = self.config.max_sequences
                raise OutOfSequences(f"all {limit} sequences are in use", limit=limit)
            if not self.tables.index.has_room_for(args.tenant):
                raise InvalidField("too many tenants on this pool", field="tenant", limit=MAX_TENANTS)
            self.revision += 1
            slot = seqs.take_slot()
            seqs.ids[slot], seqs.owners[slot] = sequence_id, owner.number
            seqs.states[slot] = SequenceState.WAITING
            seqs.roots[slot] = self.tables.index.root(args.tenant)
            if self.config.tenant_quotas:
                self.tables.pool.limits.name_tenant(args.tenant, int(seqs.roots[slot]))
            seqs.tokens[slot, :num_tokens] = args.token_ids
            seqs.num_tokens[slot] = seqs.num_prompt[slot] = num_tokens
            seqs.max_tokens[slot], seqs.priorities[slot] = max_tokens, args.priority
            if args.retention is not None:
                seqs.retain(slot, args.retention.num_sink_tokens, args.retention.num_window_tokens)
            seqs.start_numbers[slot] = args.start_number or self._start_numbers.draw()
            seqs.last_access[slot] = self.now
            owner.ids.add(sequence_id, slot)
        root = self.tables.index.find_root(args.tenant)
        num_blocks = num_tokens // self.config.block_size
        return len(self.tables.match_tokens(root, args.token_ids, num_blocks)) * self.config.block_size

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

    def _check_report(self, owner: Owner, completed: Int64Array, failed: Int64Array) -> Swapping:
        """Who takes a report of orders, which is lawful. Raises InvalidField."""
        swapping = self.tables.swapping
        if swapping is None:
            field = "completed_transfer_ids" if len(completed) else "failed_transfer_ids"
            raise InvalidField("no transfer order was ever issued", field=field)
        swapping.mover.transfers.check_report(owner, completed, failed)
        return swapping

    def _apply(self, owner: Owner, batch: StepBatch, plan: StepPlan) -> StepReply:
        tables, log = self.tables, StepLog()
        self.revision += 1
        tables.progress.now = self.now
        if tables.progress.claims:
            tables.progress.pass_time(self.now)
        tables.counters.num_steps += 1
        forks: list[ItemResult] = []
        starts: list[StartResult] = []
        refused: set[int] = set()
        swap_outs = swap_ins = NO_INT32
        swapping = tables.swapping
        if swapping is not None:
            swapping.begin(owner, log.orders)
            if len(batch.completed_transfers) or len(batch.failed_transfers):
                swapping.report(batch.completed_transfers, batch.failed_transfers)
            if swapping.arrived:
                log.ready.extend(swapping.wake(owner))
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
        if swapping is not None:
            swapping.finish(owner)
        num_give_back = 0
        if tables.progress.claims:
            tables.progress.end_step(owner)
            num_give_back = tables.progress.num_give_back(owner)
        reply = self._reply(log, forks, starts, plan, grants, num_give_back)
        if owner.logits and len(batch.start_ids):
            held = [owner.logits.get(sequence_id) for sequence_id in batch.start_ids.tolist()]
            has_logits = _int32([item is not None and item.step_id == owner.step_id for item in held])
            reply = reply._replace(start_has_logits=has_logits if has_logits.any() else NO_INT32)
        if log.orders or log.ready or has_swaps(batch):
            reply = self._with_moves(reply, owner, log, swap_outs, swap_ins)
        return reply

    def _fork_all(self, owner: Owner, batch: StepBatch) -> tuple[list[ItemResult], set[int]]:
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

    def _tell_updates(self, owner: Owner, log: StepLog) -> None:
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

    def _start(self, owner: Owner, log: StepLog, slot: int, max_new: int, max_hit: int) -> StartResult:
        if not self.tables.start(owner, log, slot, max_hit, max_new, num_spare=self._num_spare()):
            return StartResult.NO_ROOM
        if self.tables.sequences.states[slot] == SequenceState.LOADING and not self._load_now(owner, log, slot):
            return StartResult.LOADING
        return StartResult.STARTED

    def _load_now(self, owner: Owner, log: StepLog, slot: int) -> bool:
        """Whether a sequence that was to load runs already, because its orders are run before the answer."""
        swapping = self.tables.swapping
        assert swapping is not None, "a load without a host tier"
        swapping.run_now(owner)
        woken = swapping.wake(owner)
        log.ready.extend(other for other in woken if other != slot)
        return slot in woken

    def _swap_all(self, owner: Owner, log: StepLog, batch: StepBatch) -> tuple[Int32Array, Int32Array]:
        """Results of the swap-outs and swap-ins: OK also where nothing is to be done. Without a host tier nothing fits."""
        swapping, states = self.tables.swapping, self.tables.sequences.states
        outs: list[ItemResult] = []
        ins: list[ItemResult] = []
        for slot in owner.ids.find(batch.swap_out_ids, "swap_out_sequence_ids").tolist():
            done = states[slot] != SequenceState.RUNNING or (swapping is not None and swapping.swap_out(owner, slot))
            outs.append(ItemResult.OK if done else ItemResult.NO_ROOM)
            if swapping is not None:
                swapping.run_now(owner)
        for slot in owner.ids.find(batch.swap_in_ids, "swap_in_sequence_ids").tolist():
            done = True
            if swapping is not None and states[slot] == SequenceState.SWAPPED:
                done = self._swap_in(owner, swapping, slot)
                if states[slot] == SequenceState.RUNNING or (done and self._load_now(owner, log, slot)):
                    log.ready.append(slot)
            ins.append(ItemResult.OK if done else ItemResult.NO_ROOM)
        return _int32(outs), _int32(ins)

    def _swap_in(self, owner: Owner, swapping: Swapping, slot: int) -> bool:
        """A swap-in claims as a start does, and leaves alone what is kept for elder sequences."""
        progress, num_apart = self.tables.progress, self._num_spare()
        done = swapping.swap_in(owner, slot, num_apart + (progress.num_kept_from(slot) if progress.claims else 0))
        if done:
            progress.forget(slot)
        else:
            num_missing, num_room = swapping.shortage_in(owner, slot, num_apart)
            progress.refuse(owner, slot, max(1, num_missing + self.tables.pool.num_available - num_room))
        return done

    def _with_moves(
        self, reply: StepReply, owner: Owner, log: StepLog, swap_outs: Int32Array, swap_ins: Int32Array
    ) -> StepReply:
        """The reply with what only few have: results of swaps, orders, sequences that run now."""
        seqs = self.tables.sequences
        # What was released or swapped out again in this very step is not told.
        ready = [slot for slot in dict.fromkeys(log.ready) if seqs.states[slot] == SequenceState.RUNNING]
        ready = [slot for slot in ready if seqs.owners[slot] == owner.number]
        tables = [seqs.table(slot) for slot in ready]
        return reply._replace(
            swap_out_results=swap_outs,
            swap_in_results=swap_ins,
            transfer_ids=np.array([order.id for order in log.orders], np.int64),
            transfer_kinds=_int32([order.kind for order in log.orders]),
            transfer_sources=_int32([order.source for order in log.orders]),
            transfer_destinations=_int32([order.destination for order in log.orders]),
            ready_ids=seqs.ids[ready],
            ready_hits=seqs.num_hit[ready],
            ready_reserved=seqs.num_reserved[ready],
            ready_num_blocks=_int32([len(table) for table in tables]),
            ready_block_ids=np.concatenate([NO_INT32, *tables]),
        )

    def _start_all(self, owner: Owner, log: StepLog, batch: StepBatch, plan: StepPlan) -> list[StartResult]:
        tables = self.tables
        may_wait = batch.start_may_wait if len(batch.start_may_wait) else np.zeros(len(plan.start_slots), np.int32)
        columns = (plan.start_slots, batch.start_max_new, batch.start_max_hit, may_wait)
        ended = [other.number for other in self.reclaim.owners]
        results: list[StartResult] = []
        for slot, max_new, max_hit, waits in zip(*(column.tolist() for column in columns), strict=True):
            if waits and (length := computing_len(tables, slot, max_hit, ended)):
                tables.progress.forget(slot)  # it is not for want of blocks that it waits
                tables.counters.num_computing_answers += 1
                log.computing_lens[slot] = length
                results.append(StartResult.COMPUTING)
            else:
                results.append(self._start(owner, log, slot, max_new, max_hit))
        return results

    def _reserve_all(self, owner: Owner, log: StepLog, batch: StepBatch, plan: StepPlan, refused: set[int]) -> Grants:
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

    def _reply(
        self,
        log: StepLog,
        forks: list[ItemResult],
        starts: list[StartResult],
        plan: StepPlan,
        grants: Grants,
        num_give_back: int,
    ) -> StepReply:
        seqs, pool = self.tables.sequences, self.tables.pool
        # A start that was refused holds nothing, so its row tells zeros by itself. What is loading is told when it is there.
        tables = [seqs.table(slot) for slot in plan.start_slots.tolist()]
        reserved = seqs.num_reserved[plan.start_slots] if tables else NO_INT32
        if StartResult.LOADING in starts:
            is_loading = [result is StartResult.LOADING for result in starts]
            tables = [NO_INT32 if loads else table for table, loads in zip(tables, is_loading, strict=True)]
            reserved[is_loading] = 0
        hits = seqs.num_hit[plan.start_slots] if tables else NO_INT32
        if log.computing_lens:
            lens = log.computing_lens
            hits = _int32([lens.get(slot, hit) for slot, hit in zip(plan.start_slots.tolist(), hits.tolist(), strict=True)])
        return StepReply(
            fork_results=_int32(forks),
            start_results=_int32(starts),
            start_hits=hits,
            start_reserved=reserved,
            start_num_blocks=_int32([len(table) for table in tables]),
            start_block_ids=np.concatenate(tables) if tables else NO_INT32,
            reserve_reserved=grants.reserved,
            new_block_item_idx=grants.item_idx,
            new_block_ids=grants.blocks,
            update_ids=np.array(log.update_ids, np.int64) if log.update_ids else NO_INT64,
            update_table_idx=_int32(log.update_table_idx),
            update_block_ids=_int32(log.update_blocks),
            copy_sources=_int32(log.copy_sources),
            copy_destinations=_int32(log.copy_destinations),
            num_free=len(pool.free),
            num_evictable=pool.num_evictable,
            num_fenced=pool.num_fenced,
            pressure=self._note_change(),
            revision=self.revision,
            num_give_back=num_give_back,
        )

    @property
    def pressure(self) -> PressureLevel:
        """How full the pool is."""
        return self.gauge.level

    def _note_change(self) -> PressureLevel:
        """Blocks were taken, or came free."""
        return self.gauge.update(self.tables.pool.num_used)

    def _tell_pressure(self, level: PressureLevel) -> None:
        if self.tables.index.journal is not None:
            self.tables.index.journal.pressure_changed(level)

    def num_give_back(self, session: SessionId) -> int:
        """Blocks that the eldest claim misses, where the session runs younger sequences."""
        progress = self.tables.progress
        if not progress.claims:
            return 0
        progress.pass_time(self.now)
        return progress.num_give_back(self._owner(session))

    def _num_spare(self) -> int:
        """Blocks kept for running sequences to grow into; when none runs, nothing is to be kept."""
        return self._num_spare_blocks if self.tables.sequences.some_run else 0

    def _owner(self, session: SessionId) -> Owner:
        if session not in self._owners:
            raise UnknownSession("no live session of this id on this pool")
        return self._owners[session]

    def _is_same(self, slot: int, args: SequenceArgs, max_tokens: int) -> bool:
        seqs = self.tables.sequences
        return (
            seqs.parent_ids[slot] == 0
            and seqs.num_prompt[slot] == len(args.token_ids)
            and seqs.max_tokens[slot] == max_tokens
            and seqs.priorities[slot] == args.priority
            and seqs.retention(slot) == args.retention
            and args.start_number in (0, seqs.start_numbers[slot])
            and seqs.roots[slot] == self.tables.index.find_root(args.tenant)
            and np.array_equal(seqs.tokens[slot, : len(args.token_ids)], args.token_ids)
        )

    def _writable_blocks(self, slot: int) -> Int32Array:
        """Blocks that a step of the sequence's owner may still write: those behind its committed length, or its hit to come.

        What is being loaded is the transfers' to keep.
        """
        seqs, first = self.tables.sequences, int(self.tables.sequences.num_committed[slot])
        if seqs.states[slot] == SequenceState.LOADING:
            swapping = self.tables.swapping
            assert swapping is not None, "a load without a host tier"
            hit_len = swapping.moves[slot].hit_len
            if hit_len is None:
                return NO_INT32
            first = hit_len
        elif seqs.states[slot] != SequenceState.RUNNING and not seqs.keeps_table[slot]:
            return NO_INT32
        return seqs.table(slot)[first // self.config.block_size :]

    def _end_transfers(self, owner: Owner, *, may_still_write: bool) -> None:
        """Orders of a session that ends: whatever they fill is kept from reuse with the rest that it may still write."""
        assert self.tables.swapping is not None
        blocks = self.tables.swapping.end_session(owner, may_still_write=may_still_write)
        if len(blocks):
            self._quarantines[owner.session] = np.concatenate([self._quarantines[owner.session], blocks])


def _int32(values: Sequence[int]) -> Int32Array:
    """An array; the empty one is shared, because most lists of most steps are empty."""
    return np.array(values, np.int32) if values else NO_INT32
