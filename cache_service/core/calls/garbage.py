"""CollectGarbage: frees blocks that no sequence can use any more.

Takes surplus blocks from one-item sessions only: those are shown the whole table with every answer, while a session that steps
hears of tables by what is added, and would go on writing to a block that it does not have any more. Of sessions other than the
caller only sequences that were not used for GARBAGE_IDLE seconds are cut. Where layers have states, none is: the last block
has the state.
"""

from typing import NamedTuple

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..tiers.sequence_swap import SequenceSwapper
from ..values.types import Int32Array, SequenceState, SessionId
from .maintenance import Maintenance

GARBAGE_IDLE = 10.0


class Garbage(NamedTuple):
    """What was collected; names are the protocol's."""

    num_freed_blocks: int
    num_expired_blocks: int
    num_expired_pins: int
    num_trimmed_blocks: int
    num_freed_host_blocks: int


class GarbageCalls:
    """Collects the garbage of one pool."""

    def __init__(self, state: PoolState, maintenance: Maintenance, swapper: SequenceSwapper | None) -> None:
        self._state = state
        self._maintenance = maintenance
        self._swapper = swapper

    def collect(self, session: SessionId) -> Garbage:
        """Frees what is due, and blocks behind the known tokens of sequences that no step writes."""
        state, pool = self._state, self._state.pool
        caller = state.session(session)
        num_free, num_pins, num_expired = len(pool.free), len(state.pins), pool.limits.num_expired
        num_free_hosts = self._num_free_hosts()
        state.publish()
        while self._maintenance.do_due_work():
            pass
        trimmed = [] if state.sequences.has_states else [owner for owner in state.sessions.values() if owner.is_one_item]
        num_trimmed = sum(self._trim(owner, caller) for owner in trimmed)
        state.revision += num_trimmed > 0
        state.update_pressure()
        num_freed = len(pool.free) - num_free
        state.counters.num_collected_blocks += num_freed
        return Garbage(
            num_freed_blocks=num_freed,
            num_expired_blocks=pool.limits.num_expired - num_expired,
            num_expired_pins=num_pins - len(state.pins),
            num_trimmed_blocks=num_trimmed,
            num_freed_host_blocks=self._num_free_hosts() - num_free_hosts,
        )

    def _trim(self, owner: SessionState, caller: SessionState) -> int:
        """Gives up the surplus of one session's running sequences. Returns how many blocks."""
        state, seqs, num_trimmed = self._state, self._state.sequences, 0
        for slot in owner.ids.items()[1].tolist():
            if seqs.states[slot] != SequenceState.RUNNING:
                continue
            if owner is not caller and state.now - seqs.accesses.last[slot] < GARBAGE_IDLE:
                continue
            blocks = self._surplus(slot)
            if len(blocks):
                seqs.trim_reserved(slot, (len(seqs.tables.get(slot)) - len(blocks) // seqs.num_groups) * seqs.block_size)
                owner.drop_blocks(state.pool, blocks, until=owner.completed_step_id)
                num_trimmed += len(blocks)
        return num_trimmed

    def _surplus(self, slot: int) -> Int32Array:
        """Blocks behind the known tokens of a running sequence, as many of each group, the last one first."""
        seqs = self._state.sequences
        first = seqs.num_blocks(int(seqs.num_tokens[slot]))
        return np.concatenate([seqs.tables.get(slot, group)[first:][::-1] for group in range(seqs.num_groups)])

    def _num_free_hosts(self) -> int:
        return len(self._swapper.host.pool.free) if self._swapper is not None else 0
