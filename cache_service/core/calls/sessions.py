"""Sessions of a pool: how they open, and which blocks they leave behind when they end.

What a session cached stays cached; what it may still write is quarantined; what it held is given back by reclaim.py.
docs/inside/architecture.md describes it block by block.
"""

from typing import NamedTuple

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..tiers.sequence_swap import SequenceSwapper
from ..values.types import NO_INT32, Executor, SessionId
from .reclaim import Reclaim


class CloseResult(NamedTuple):
    """Counts of the end of a session."""

    num_released_sequences: int
    num_quarantined_blocks: int


class SessionCalls:
    """Opens and closes the sessions of one pool."""

    def __init__(self, state: PoolState, reclaim: Reclaim, swapper: SequenceSwapper | None) -> None:
        self._state = state
        self._sequences = state.sequences
        self._pool = state.pool
        self._reclaim = reclaim
        self._swapper = swapper
        self._num_opened = 0

    def open(self, session: SessionId, executor: Executor, caller: str = "", *, takes_partial: bool = False) -> None:
        """caller: that its sequences count for, see PoolState.slot_limit. takes_partial: as OpenSessionRequest has it."""
        assert session not in self._state.sessions, "a session id is drawn once"
        self._num_opened += 1
        owner = SessionState(self._num_opened, session, executor, caller)
        owner.takes_partial = takes_partial and not self._state.config.has_tail
        self._state.sessions[session] = owner

    def close(self, session: SessionId, *, may_still_write: bool) -> CloseResult:
        """Ends a session. Full committed blocks stay cached; blocks that it may still write are kept from reuse.

        Of a large one, a rest is left for `reclaim_blocks`, blocks that it may still write among them.
        """
        state, pool = self._state, self._pool
        owner = state.session(session)
        state.revision += 1
        state.publish()
        ids, slots = owner.ids.items()
        self._end_device_work(owner, may_still_write=may_still_write)
        state.claims.forget_claims(slots)
        self._reclaim.add_ended(owner)
        state.pins.end_pins(session)
        if self._swapper is not None:
            self._end_transfers(owner, self._swapper, may_still_write=may_still_write)
        del state.sessions[session]
        state.update_pressure()
        return CloseResult(len(ids), pool.num_distinct(state.quarantines.get(session, NO_INT32)))

    def reclaim_blocks(self, max_blocks: int) -> bool:
        """Gives back about so many blocks of sessions that ended. Whether any are left."""
        is_left = self._reclaim.release_blocks(max_blocks)
        self._state.update_pressure()
        return is_left

    def end_quarantine(self, session: SessionId) -> int:
        """The ended session can write no more: blocks that came free; 0 for a session not in quarantine."""
        if self._swapper is not None:
            self._swapper.host.end_quarantine(session)
        for owner in self._state.ended_sessions:
            if owner.session == session:
                owner.may_still_write = False
        blocks = self._state.quarantines.pop(session, None)
        if blocks is None:
            return 0
        self._state.revision += 1
        num_freed = self._pool.end_quarantine(blocks)
        self._state.update_pressure()
        return num_freed

    def reclaim_hint(self, session: SessionId) -> int:
        """Blocks that the oldest claim misses, where the session runs later arrivals."""
        claims = self._state.claims
        if not claims.claims:
            return 0
        claims.forget_stale()
        return claims.reclaim_hint(self._state.session(session))

    def _end_device_work(self, owner: SessionState, *, may_still_write: bool) -> None:
        """No step and no copy of the session is waited for any more; fenced blocks that they may still write are kept back."""
        state, pool = self._state, self._pool
        fences = owner.fenced_blocks()
        owner.fences.clear()
        # A copy in flight fills its block also where a commit for the step before has covered it, or where it was dropped.
        filling = owner.filling_blocks()
        owner.end_copies(pool)
        if owner.executor is Executor.ENGINE:  # it may have ended before it ran its last copies, clears among them
            state.allocator.distrust(filling)
        if may_still_write:
            owner.may_still_write = True
            # No step writes an indexed block (R5), and reads by the session's last steps do no harm.
            filling, is_cached = filling[~pool.indexed[filling]], pool.indexed[fences]
            pool.quarantine(filling, fences=fences[~is_cached])
            state.quarantines[owner.session] = np.concatenate([filling, fences[~is_cached]])
            fences = fences[is_cached]
        pool.lift_fences(fences)
        owner.step_id = owner.completed_step_id  # blocks dropped now wait for the quarantine, not for a step

    def _end_transfers(self, owner: SessionState, swapper: SequenceSwapper, *, may_still_write: bool) -> None:
        """Orders of a session that ends: all that they fill is kept from reuse with the rest that it may still write."""
        blocks = swapper.end_session(owner, may_still_write=may_still_write)
        if len(blocks):
            quarantines = self._state.quarantines
            quarantines[owner.session] = np.concatenate([quarantines[owner.session], blocks])
