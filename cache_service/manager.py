"""One pool: the facade of the pure core.

Adds to the steps (step_core.py) and the calls on the prefix cache (prefix_calls.py) the one-item calls, each a step of one item
whose device work is complete at once, and the questions that change nothing. Who asks or calls publishes what is pending first,
where the answer is to see it. Knows no grpc, asyncio, torch or clock.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cache_service import invariants, tier_audit
from cache_service.block_tables import StepLog
from cache_service.errors import (
    DuplicateSequence,
    InvalidField,
    OutOfBlocks,
    OutOfHostBlocks,
    OutOfSequences,
    UnknownBlock,
    UnknownSequence,
)
from cache_service.explain import Explanation, explain_match
from cache_service.owner import Owner
from cache_service.prefix_calls import PrefixCalls
from cache_service.retention import span
from cache_service.stats import pool_stats
from cache_service.step import too_long, wrong_state
from cache_service.transfers import Order
from cache_service.types import (
    NO_INT32,
    Admission,
    BlockId,
    BlockState,
    BlockView,
    Copies,
    Executor,
    Int32Array,
    ItemResult,
    PoolStats,
    Retention,
    SequenceId,
    SequenceState,
    SequenceView,
    SessionId,
    StepBatch,
    StepReply,
)
from cache_service.updating import SequenceUpdates
from cache_service.victim_calls import VictimCalls, share_of

_FIELDS = {"commit_num_tokens": "num_tokens", "commit_token_ids": "token_ids", "fork_num_tokens": "num_tokens",
           "truncate_num_tokens": "num_tokens", "reserve_max_tokens": "num_tokens"}  # fmt: skip


class ClearResult(NamedTuple):
    """What clearing the prefix cache did."""

    num_freed_blocks: int
    num_forgotten_blocks: int


@dataclass(slots=True)
class Demotion:
    """What evictions moved to the host tier instead of forgetting it; copies are to be run before anything else."""

    num_blocks: int = 0
    copies: Copies = field(default_factory=lambda: Copies(NO_INT32, NO_INT32))


class Manager(PrefixCalls, SequenceUpdates, VictimCalls):
    """See the module."""

    # One-item calls

    def extend(self, session: SessionId, sequence_id: int, num_tokens: int, *, look_up: bool) -> Copies:
        """Reserves up to num_tokens, starting a waiting sequence first; all or nothing.

        Answers the copies to run before anything is written. Raises OutOfBlocks, which changes nothing.
        """
        owner, slot = self._find(session, sequence_id)
        seqs = self.tables.sequences
        if num_tokens < 1:
            raise InvalidField("a reservation wants 1 token or more", field="num_tokens", limit=1)
        if num_tokens > seqs.max_tokens[slot]:
            raise too_long("num_tokens", int(seqs.max_tokens[slot]))
        span(seqs, slot).check_fits("num_tokens", num_tokens, seqs)
        if seqs.states[slot] == SequenceState.RUNNING:
            reply = self._step_once(
                owner,
                reserve_ids=np.array([sequence_id]),
                reserve_min=np.array([num_tokens], np.int32),
                reserve_max=np.array([num_tokens], np.int32),
            )
            if reply.reserve_reserved[0] >= num_tokens:
                return copies_of(reply)
            self.tables.progress.forget(slot)  # what is refused with an error leaves no trace
        elif seqs.states[slot] != SequenceState.WAITING:
            raise wrong_state(sequence_id, int(seqs.states[slot]))
        else:
            log, owner.is_one_item = StepLog(), True
            self.tables.progress.pass_time(self.now)
            max_hit = num_tokens if look_up else 0
            if self._start_exactly(owner, log, slot, max_hit, num_tokens):
                self.revision += 1
                self.tables.counters.num_steps += 1
                self._note_change()
                return _copies(log.copy_sources, log.copy_destinations, log.orders)
        requested, available = self._shortage(owner, slot, num_tokens, look_up=look_up)
        raise OutOfBlocks(f"{requested} blocks asked for, {available} to be had", requested=requested, available=available)

    def commit(
        self, session: SessionId, sequence_id: int, num_tokens: int, first_token_idx: int, token_ids: Int32Array
    ) -> None:
        """Appends token ids, which stand at first_token_idx, and commits. What is stored already is not stored twice."""
        owner, slot = self._find(session, sequence_id)
        seqs = self.tables.sequences
        known = int(seqs.num_tokens[slot])
        repeated = token_ids[: max(known - first_token_idx, 0)]
        stored = seqs.tokens[slot, first_token_idx : first_token_idx + len(repeated)]
        if not 0 <= first_token_idx <= known or not np.array_equal(repeated, stored):
            raise InvalidField(f"{known} tokens are stored, and other ones", field="first_token_idx", limit=known)
        new = token_ids[len(repeated) :]
        if len(new) == 0 and num_tokens <= seqs.num_committed[slot]:
            return
        self._step_once(
            owner,
            commit_ids=np.array([sequence_id]),
            commit_lens=np.array([num_tokens], np.int32),
            commit_num_new=np.array([len(new)], np.int32),
            commit_tokens=new,
        )

    def fork(self, session: SessionId, parent_id: int, child_id: int, num_tokens: int | None) -> None:
        """Shares the parent's first tokens, by default all committed ones. The same fork again changes nothing."""
        owner, parent = self._find(session, parent_id)
        seqs = self.tables.sequences
        num_tokens = num_tokens or int(seqs.num_committed[parent])
        child = owner.ids.get(child_id)
        if child is not None:
            shared = seqs.tokens[parent, :num_tokens]
            is_same = seqs.parent_ids[child] == parent_id and seqs.num_prompt[child] == num_tokens
            if is_same and np.array_equal(seqs.tokens[child, :num_tokens], shared):
                return
            raise DuplicateSequence(f"sequence {child_id} exists", sequence_id=child_id)
        reply = self._step_once(
            owner,
            fork_parents=np.array([parent_id]),
            fork_children=np.array([child_id]),
            fork_lens=np.array([num_tokens], np.int32),
        )
        if reply.fork_results[0] == ItemResult.NO_ROOM:
            limit = self.config.max_sequences
            raise OutOfSequences(f"all {limit} sequences are in use", limit=limit)

    def truncate(self, session: SessionId, sequence_id: int, num_tokens: int) -> None:
        """Cuts to num_tokens, 1 or more, and gives back the blocks behind."""
        owner, _ = self._find(session, sequence_id)
        lens = np.array([num_tokens], np.int32)
        self._step_once(owner, truncate_ids=np.array([sequence_id]), truncate_lens=lens)

    def release(self, session: SessionId, sequence_id: int) -> int:
        """Gives a sequence's blocks back and forgets it. Answers how many of them nothing else holds."""
        owner, slot = self._find(session, sequence_id)
        table = self.tables.shown_table(slot)
        alone = int(np.count_nonzero(self.tables.pool.ref_counts[table[table > 0]] == 1))
        self._step_once(owner, release_ids=np.array([sequence_id]))
        return alone

    def swap_out(self, session: SessionId, sequence_id: int) -> Copies:
        """Moves a sequence to the host tier; one that is there stays there. Raises OutOfHostBlocks, which changes nothing."""
        owner, slot = self._find(session, sequence_id)
        reply = self._step_once(owner, swap_out_ids=np.array([sequence_id]))
        if reply.swap_out_results[0] == ItemResult.NO_ROOM:
            swapping = self.tables.swapping
            num_blocks = np.count_nonzero(self.tables.sequences.table(slot))
            requested, available = swapping.shortage(owner, slot) if swapping is not None else (int(num_blocks), 0)
            raise OutOfHostBlocks(f"{requested} host blocks, {available} to be had", requested=requested, available=available)
        return copies_of(reply)

    def swap_in(self, session: SessionId, sequence_id: int) -> Copies:
        """Moves a sequence back to the device; one that is there stays. Raises OutOfBlocks, which changes nothing."""
        owner, slot = self._find(session, sequence_id)
        reply = self._step_once(owner, swap_in_ids=np.array([sequence_id]))
        if reply.swap_in_results[0] == ItemResult.NO_ROOM:
            swapping = self.tables.swapping
            assert swapping is not None, "a swapped sequence without a host tier"
            progress = self.tables.progress
            progress.forget(slot)  # what is refused with an error leaves no trace
            requested, room = swapping.shortage_in(owner, slot, self._num_spare() + progress.num_kept_from(slot))
            available = max(room, 0)
            raise OutOfBlocks(f"{requested} blocks asked for, {available} to be had", requested=requested, available=available)
        return copies_of(reply)

    # Questions

    def view(self, session: SessionId, sequence_id: int) -> SequenceView:
        """One sequence with its block table. Raises UnknownSequence."""
        owner, slot = self._find(session, sequence_id)
        return self._view(owner, slot, self.tables.shown_table(slot).copy())

    def start_number(self, session: SessionId, sequence_id: int) -> int:
        """The sequence's place in the order of arrivals."""
        _, slot = self._find(session, sequence_id)
        return int(self.tables.sequences.start_numbers[slot])

    def readable(self, session: SessionId, sequence_id: int) -> SequenceView:
        """The same, to read K and V through the table. Raises WrongState where they are not on the device."""
        view = self.view(session, sequence_id)
        if view.state not in (SequenceState.WAITING, SequenceState.RUNNING):
            raise wrong_state(sequence_id, view.state)
        return view

    def note_read(self, session: SessionId, sequence_id: int) -> None:
        """K and V of the sequence are read: an access like a step that names it."""
        _, slot = self._find(session, sequence_id)
        self.tables.sequences.note_access(np.array([slot]), self.now)

    def tokens(self, session: SessionId, sequence_id: int) -> Int32Array:
        """[num_tokens] token ids."""
        _, slot = self._find(session, sequence_id)
        return self.tables.sequences.tokens[slot, : self.tables.sequences.num_tokens[slot]].copy()

    def views(self, session: SessionId | None) -> Iterator[SequenceView]:
        """Sequences of one session or of all, by session and id, without tables. Raises UnknownSession."""
        owners = [self._owner(session)] if session else sorted(self._owners.values(), key=lambda owner: owner.session)
        for owner in owners:
            for slot in owner.ids.items()[1].tolist():
                yield self._view(owner, slot, np.empty(0, np.int32))

    def writable_slots(self, session: SessionId, sequence_id: int) -> tuple[int, int]:
        """[committed, reserved): the token indices whose K and V may be written. Raises WrongState."""
        _, slot = self._find(session, sequence_id)
        state = int(self.tables.sequences.states[slot])
        if state in (SequenceState.SWAPPED, SequenceState.LOADING):
            raise wrong_state(sequence_id, state)
        return int(self.tables.sequences.num_committed[slot]), int(self.tables.sequences.num_reserved[slot])

    def match_prefix(self, tenant: str, token_ids: Int32Array) -> Int32Array:
        """[matched] block ids of the longest cached prefix in any tier, whole blocks; 0 for one in the host tier only."""
        root = self.tables.index.find_root(tenant)
        nodes = self.tables.match_tokens(root, token_ids, len(token_ids) // self.config.block_size)
        return self.tables.index.block_of_node[nodes]

    def explain_match(self, tenant: str, token_ids: Int32Array) -> Explanation:
        """Why the longest cached prefix ends where it does. May take a millisecond."""
        return explain_match(self.tables, self.config, tenant, token_ids)

    def block_view(self, block: int) -> BlockView:
        """Raises UnknownBlock."""
        pool, index = self.tables.pool, self.tables.index
        if not 0 < block < pool.num_blocks:
            raise UnknownBlock(f"the pool has no block {block}", limit=pool.num_blocks - 1)
        return BlockView(
            state=pool.state(block),
            num_references=int(pool.ref_counts[block]),
            num_fences=int(pool.fence_counts[block]),
            num_transfers=int(pool.transfer_counts[block]),
            num_quarantines=int(pool.quarantine_counts[block]),
            indexed=bool(pool.indexed[block]),
            has_host_copy=bool(index.host_of_node[index.node_of_block[block]]),
        )

    def check_admission(
        self,
        tenant: str,
        token_ids: Int32Array | None,
        num_prompt_tokens: int,
        num_new_tokens: int,
        retention: Retention | None = None,
    ) -> Admission:
        """Whether a prompt could start whole now, later or never. num_prompt_tokens counts where token_ids are not given.

        With retention it need not start whole: what it holds at once is enough.
        """
        pool, block_size = self.tables.pool, self.config.block_size
        hits = np.empty(0, np.int32)
        if token_ids is not None:
            num_prompt_tokens = len(token_ids)
            hits = self.match_prefix(tenant, token_ids)[: (num_prompt_tokens - 1) // block_size]
        num_required = -(-num_prompt_tokens // block_size)
        if retention is not None:
            hits = hits[: (retention.num_sink_tokens + retention.num_window_tokens) // block_size]
            num_required = min(num_required, max(retention.num_held_blocks(block_size), len(hits) + 1))
        if len(hits) * block_size < self.config.min_prefix_tokens:
            hits = hits[:0]
        num_required -= int(np.count_nonzero(hits))  # what is to be loaded takes a block too
        num_room = pool.num_available - pool.num_revived(hits) - self._num_spare()
        has_room = num_required <= num_room or self.tables.could_pins_give_way(None, num_required - num_room, hits)
        limit = self.config.limit_with(retention)
        self.tables.progress.pass_time(self.now)
        if self.tables.progress.would_be_younger(priority=0):
            num_room, has_room = 0, False  # an elder one waits, and nobody starts before it
        can_ever = num_prompt_tokens + num_new_tokens <= limit
        return Admission(
            can_now=can_ever and has_room and self.tables.sequences.num_free_slots > 0,
            can_ever=can_ever,
            num_hit_tokens=len(hits) * block_size,
            num_required_blocks=num_required,
            num_available_blocks=max(0, num_room),
            limit_tokens=limit,
        )

    def clear_prefix_cache(self) -> ClearResult:
        """Forgets every cached block that nothing holds; blocks in use lose their index entry, and pins end."""
        self.revision += 1
        self.tables.pins.clear()
        result = ClearResult(*self.tables.publisher.clear_index())
        self._note_change()
        return result

    def evict_blocks(self, num_free_blocks: int) -> int:
        """Evicts until so many blocks are free or nothing more can be evicted. Answers how many were."""
        return self._evict(num_free_blocks - len(self.tables.pool.free))

    def evict_count(self, num_blocks: int) -> int:
        """Evicts so many cached blocks, or all. Answers how many were."""
        return self._evict(num_blocks)

    def evict_to(self, max_utilization: float) -> int:
        """Evicts until at most this share of the pool is held or cached, as far as that can be. Answers how many were."""
        return self._evict(self._num_above(max_utilization))

    def evict_excess(self, max_blocks: int) -> int:
        """Evicts at most so many of the cached blocks above the configured share. Answers how many were.

        For the time between steps, so that the next one finds its blocks free.
        """
        return self._evict(min(self._num_above(self.config.evict_above), max_blocks)) if self.config.evict_above < 1 else 0

    @contextmanager
    def demoting(self, session: SessionId) -> Iterator[Demotion]:
        """What is evicted inside is moved to the host tier, if the session's orders are run by the cache service.

        Others hear of orders with a step only: for them it is forgotten.
        """
        owner, swapping, result = self._owner(session), self.tables.swapping, Demotion()
        if swapping is None or owner.executor is Executor.ENGINE:
            yield result
            return
        orders: list[Order] = []
        before = swapping.mover.num_demoted
        swapping.begin(owner, orders)
        yield result
        swapping.finish(owner)
        result.num_blocks, result.copies = swapping.mover.num_demoted - before, _copies([], [], orders)

    def stats(self) -> PoolStats:
        """Counts derived from the state, and sums over the pool's life."""
        return pool_stats(self.tables, self.gauge, self.revision, self.num_sessions)

    def check_invariants(self) -> list[str]:
        """What is wrong, one sentence each; empty when all is well."""
        owners = [*self._owners.values(), *self.reclaim.owners]
        wrong = invariants.violations(self.tables, owners, list(self._quarantines.values()))
        if self.tables.swapping is not None and not wrong:
            wrong = tier_audit.violations(self.tables, self.tables.swapping)
        return wrong

    def block_state(self, block: BlockId) -> BlockState:
        return self.tables.pool.state(block)

    def _num_above(self, share: float) -> int:
        """How many of the held and cached blocks are above this share of the pool."""
        num_usable = self.config.num_usable_blocks
        return num_usable - len(self.tables.pool.free) - share_of(self.config, share)

    def _evict(self, count: int) -> int:
        pool = self.tables.pool
        count = min(max(count, 0), pool.num_evictable)
        if count:
            self.revision += 1
            pool.evict(count)
        return count

    def _find(self, session: SessionId, sequence_id: int) -> tuple[Owner, int]:
        owner = self._owner(session)
        slot = owner.ids.get(sequence_id)
        if slot is None:
            raise UnknownSequence(f"no sequence {sequence_id} in this session", sequence_id=sequence_id)
        return owner, slot

    def _shortage(self, owner: Owner, slot: int, num_tokens: int, *, look_up: bool) -> tuple[int, int]:
        """(blocks that an extend takes beside its hit, copies included; blocks that it could have)."""
        seqs, pool = self.tables.sequences, self.tables.pool
        num_needed = seqs.num_blocks(num_tokens) - len(seqs.table(slot))
        if seqs.states[slot] == SequenceState.RUNNING:
            num_room = max(0, pool.num_available - self.tables.progress.num_kept_from(slot))
            return num_needed + len(self.tables.copies_due(owner, slot, num_tokens)), num_room
        hits = self.tables.index.block_of_node[self.tables.match(slot, num_tokens if look_up else 0)]
        hits = hits[: int(np.argmin(hits > 0))] if not hits.all() else hits
        if self.tables.progress.is_younger(slot):
            return num_needed - len(hits), 0
        return num_needed - len(hits), max(0, pool.num_available - pool.num_revived(hits) - self._num_spare())

    def _start_exactly(self, owner: Owner, log: StepLog, slot: int, max_hit: int, num_tokens: int) -> bool:
        """Starts a waiting sequence; what it hits in the host tier is loaded by whoever runs the copies of this call."""
        swapping = self.tables.swapping
        if swapping is not None:
            swapping.begin(owner, log.orders)
        started = self.tables.start(owner, log, slot, max_hit, 0, num_spare=self._num_spare(), exactly=num_tokens)
        if swapping is not None:
            swapping.finish(owner)
            swapping.wake(owner)
        return started

    def _step_once(self, owner: Owner, **columns: np.ndarray) -> StepReply:
        owner.is_one_item = True
        step_id = owner.step_id + 1
        try:
            reply = self.step(owner.session, StepBatch(step_id, step_id - 1, **columns))
        except InvalidField as error:  # names a column of the step, where the call has a field
            error.metadata["field"] = _FIELDS.get(error.metadata["field"], error.metadata["field"])
            raise
        self._publish()
        owner.updates.clear()  # whoever asks is shown the table itself
        owner.complete(self.tables.pool, step_id)
        self._note_change()
        return reply

    def _view(self, owner: Owner, slot: int, table: Int32Array) -> SequenceView:
        seqs = self.tables.sequences
        return SequenceView(
            sequence_id=SequenceId(int(seqs.ids[slot])),
            session_id=owner.session,
            state=SequenceState(int(seqs.states[slot])),
            num_tokens=int(seqs.num_tokens[slot]),
            num_committed_tokens=int(seqs.num_committed[slot]),
            num_reserved_tokens=int(seqs.num_reserved[slot]),
            max_tokens=int(seqs.max_tokens[slot]),
            priority=int(seqs.priorities[slot]),
            num_hit_tokens=int(seqs.num_hit[slot]),
            num_accesses=int(seqs.num_accesses[slot]),
            block_table=table,
            num_host_blocks=self.tables.swapping.host.num_blocks_of(slot) if self.tables.swapping is not None else 0,
            retention=seqs.retention(slot),
            start_number=int(seqs.start_numbers[slot]),
            idle_seconds=max(0.0, self.now - float(seqs.last_access[slot])),
        )


def copies_of(reply: StepReply) -> Copies:
    """What a step wants to have run."""
    transfers = (reply.transfer_kinds, reply.transfer_sources, reply.transfer_destinations)
    return Copies(reply.copy_sources, reply.copy_destinations, *transfers)


def _copies(sources: list[int], destinations: list[int], orders: list[Order]) -> Copies:
    columns = [[order.kind for order in orders], [order.source for order in orders], [order.destination for order in orders]]
    return Copies(*(np.array(column, np.int32) for column in (sources, destinations, *columns)))
