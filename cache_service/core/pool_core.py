"""One pool's time and sessions: what is there before and beside the steps.

Owns the block tables and who holds what in them, what falls due by itself (pins, times to live, limits, pressure), and what a
session leaves behind when it ends: its cached blocks, and the quarantine of what it may still write. Time comes in as `now`.
"""

from typing import NamedTuple

import numpy as np

from .blocks.pressure import PressureGauge
from .calls.reclaim import Reclaim
from .sequences.claims import StartNumbers
from .sequences.publisher import ALL_BLOCKS
from .sequences.session_state import SessionState
from .tables.lifecycle import SequenceLifecycle
from .values.errors import InvalidField, UnknownSequence, UnknownSession
from .values.pool_config import PoolConfig
from .values.types import NO_INT32, Executor, Int32Array, PressureLevel, SequenceState, SessionId

_TICK_BLOCKS = 512  # forgotten in one go


class CloseResult(NamedTuple):
    """What the end of a session did."""

    num_released_sequences: int
    num_quarantined_blocks: int


class PoolState:
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
        self.tables = SequenceLifecycle(config)
        self.reclaim = Reclaim(self.tables)
        self.gauge.on_change = self._tell_pressure
        self._owners: dict[SessionId, SessionState] = {}
        self._next_owner = 1
        self._quarantines: dict[SessionId, Int32Array] = {}
        self._num_spare_blocks = int(config.num_usable_blocks * config.watermark)
        self.revision = 0

    @property
    def now(self) -> float:
        """Seconds of a monotone clock, set by whoever calls before the call."""
        return self.tables.index.eviction_log.now

    @now.setter
    def now(self, seconds: float) -> None:
        self.tables.index.eviction_log.now = seconds

    def tick(self) -> bool:
        """What falls due by itself; called about once a second while the pool stands, after `now` was set.

        Does as much as takes about a millisecond; whether more is left.
        """
        pool, limits = self.tables.pool, self.tables.pool.limits
        self.revision += self.tables.pins.expire(self.now) > 0
        self.tables.claims.pass_time(self.now)
        if not limits.is_on:
            self._note_change()
            return False
        before = len(self.tables.index)
        is_left = limits.expire(pool, _TICK_BLOCKS) | limits.enforce(pool, _TICK_BLOCKS)
        if self.tables.swapper is not None:
            host = self.tables.swapper.host.pool
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

    def open_session(self, session: SessionId, executor: Executor) -> None:
        assert session not in self._owners, "a session id is drawn once"
        self._owners[session] = SessionState(self._next_owner, session, executor)
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
        # A copy in flight fills its block also where a commit for the step before has covered it, or where it was dropped.
        filling = owner.filling_blocks()
        owner.end_copies(pool)
        if owner.executor is Executor.ENGINE:  # it may have ended before it ran its last copies, clears among them
            self.tables.distrust(filling)
        if may_still_write:
            blocks = np.concatenate([filling, *(self._writable_blocks(slot) for slot in slots.tolist())])
            # No step writes an indexed block (R5), and what the session's steps still read matters to nobody any more.
            blocks, is_cached = blocks[~pool.indexed[blocks]], pool.indexed[fences]
            pool.quarantine(blocks, fences=fences[~is_cached])
            self._quarantines[session] = np.concatenate([blocks, fences[~is_cached]])
            fences = fences[is_cached]
        pool.lift_fences(fences)
        owner.step_id = owner.completed_step_id  # what is dropped now waits for the quarantine, not for a step
        self.tables.claims.forget_all(slots)
        self.reclaim.end(owner)
        self.tables.pins.end_of(session)
        if self.tables.swapper is not None:
            self._end_transfers(owner, may_still_write=may_still_write)
        del self._owners[session]
        self._note_change()
        return CloseResult(len(ids), self.tables.pool.num_distinct(self._quarantines.get(session, NO_INT32)))

    def reclaim_some(self, max_blocks: int) -> bool:
        """Gives back about so many blocks of sessions that ended. Whether any are left."""
        is_left = self.reclaim.some(max_blocks)
        self._note_change()
        return is_left

    def end_some_transfers(self, max_orders: int) -> bool:
        """Goes on with long reports of orders that have ended, about so many of them. Whether any are left."""
        swapper = self.tables.swapper
        if swapper is None or not swapper.offloader.transfers.has_reported:
            return False
        self.revision += 1
        is_left = swapper.end_some(max_orders)
        self._note_change()
        return is_left

    def end_quarantine(self, session: SessionId) -> int:
        """The ended session can write no more: blocks that came free; 0 for a session not in quarantine."""
        if self.tables.swapper is not None:
            self.tables.swapper.end_quarantine(session)
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

    @property
    def pressure(self) -> PressureLevel:
        """How full the pool is."""
        return self.gauge.level

    def num_give_back(self, session: SessionId) -> int:
        """Blocks that the eldest claim misses, where the session runs younger sequences."""
        claims = self.tables.claims
        if not claims.claims:
            return 0
        claims.pass_time(self.now)
        return claims.num_give_back(self._owner(session))

    def _note_change(self) -> PressureLevel:
        """Blocks were taken, or came free."""
        return self.gauge.update(self.tables.pool.num_used)

    def _tell_pressure(self, level: PressureLevel) -> None:
        if self.tables.index.change_log is not None:
            self.tables.index.change_log.pressure_changed(level)

    def _num_spare(self) -> int:
        """Blocks kept for running sequences to grow into; when none runs, nothing is to be kept."""
        return self._num_spare_blocks if self.tables.sequences.some_run else 0

    def _owner(self, session: SessionId) -> SessionState:
        if session not in self._owners:
            raise UnknownSession("no live session of this id on this pool")
        return self._owners[session]

    def _writable_blocks(self, slot: int) -> Int32Array:
        """Blocks that a step of the sequence's owner may still write: those behind its committed length, or its hit to come.

        What is being loaded is the transfers' to keep.
        """
        seqs, first = self.tables.sequences, int(self.tables.sequences.num_committed[slot])
        if seqs.states[slot] == SequenceState.LOADING:
            swapper = self.tables.swapper
            assert swapper is not None, "a load without a host tier"
            hit_len = swapper.moves[slot].hit_len
            if hit_len is None:
                return NO_INT32
            first = hit_len
        elif seqs.states[slot] != SequenceState.RUNNING and not seqs.keeps_table[slot]:
            return NO_INT32
        return seqs.table(slot)[first // self.config.block_size :]

    def _end_transfers(self, owner: SessionState, *, may_still_write: bool) -> None:
        """Orders of a session that ends: whatever they fill is kept from reuse with the rest that it may still write."""
        assert self.tables.swapper is not None
        blocks = self.tables.swapper.end_session(owner, may_still_write=may_still_write)
        if len(blocks):
            self._quarantines[owner.session] = np.concatenate([self._quarantines[owner.session], blocks])

    def _find(self, session: SessionId, sequence_id: int) -> tuple[SessionState, int]:
        owner = self._owner(session)
        slot = owner.ids.get(sequence_id)
        if slot is None:
            raise UnknownSequence(f"no sequence {sequence_id} in this session", sequence_id=sequence_id)
        return owner, slot
