"""Calls on a pool that look for blocks to be had: whom to preempt, and what nobody can use any more.

Collecting garbage takes surplus blocks from one-item sessions only: those are shown the whole table with every answer, while a
session that steps hears of tables by what is added, and would go on writing to a block that it does not have any more. Of
others than the caller only sequences that nobody has used for GARBAGE_IDLE seconds are cut.
"""

import math
from typing import NamedTuple

from ..step.apply import StepApplier
from ..values.pool_config import PoolConfig
from ..values.types import SequenceState, SessionId
from .victims import VictimChooser, Victims, surplus

GARBAGE_IDLE = 10.0
_ROUNDING = 1e-9  # 0.7 of 10 blocks is 7 blocks


class Garbage(NamedTuple):
    """What was collected; names are the protocol's."""

    num_freed_blocks: int
    num_expired_blocks: int
    num_expired_pins: int
    num_trimmed_blocks: int
    num_freed_host_blocks: int


class VictimCalls(StepApplier):
    """See the module."""

    _victims: VictimChooser | None = None  # made when first asked for

    def select_victims(self, session: SessionId, policy: str, num_blocks: int, max_utilization: float | None = None) -> Victims:
        """Which of the session's sequences to preempt until num_blocks come free (0: one victim), or until so much is held."""
        owner = self._owner(session)
        if self._victims is None:
            self._victims = VictimChooser(self.tables)
        if max_utilization is not None:
            num_blocks = self.tables.pool.num_used - share_of(self.config, max_utilization)
            if num_blocks <= 0:
                return Victims([], [])
        return self._victims.choose(owner, policy, max(num_blocks, 1), self.now)

    def collect_garbage(self, session: SessionId) -> Garbage:
        """Frees what is due, and blocks behind the known tokens of sequences that no step writes."""
        caller, pool, seqs = self._owner(session), self.tables.pool, self.tables.sequences
        num_free, num_pins, num_expired = len(pool.free), len(self.tables.pins), pool.limits.num_expired
        swapper = self.tables.swapper
        num_free_hosts = len(swapper.host.pool.free) if swapper is not None else 0
        self._publish()
        while self.tick():
            pass
        num_trimmed = 0
        for owner in self._owners.values():
            for slot in owner.ids.items()[1].tolist() if owner.is_one_item else ():
                if seqs.states[slot] != SequenceState.RUNNING:
                    continue
                if owner is not caller and self.now - seqs.last_access[slot] < GARBAGE_IDLE:
                    continue
                blocks = surplus(self.tables, slot)
                if len(blocks):
                    num_kept = len(seqs.table(slot)) - len(blocks)
                    for column in (seqs.num_reserved, seqs.num_reserved_before):
                        column[slot] = min(int(column[slot]), num_kept * seqs.block_size)
                    owner.drop(pool, blocks, until=owner.completed_step_id)
                    num_trimmed += len(blocks)
        self.revision += num_trimmed > 0
        self._note_change()
        num_freed = len(pool.free) - num_free
        self.tables.counters.num_collected_blocks += num_freed
        return Garbage(
            num_freed_blocks=num_freed,
            num_expired_blocks=pool.limits.num_expired - num_expired,
            num_expired_pins=num_pins - len(self.tables.pins),
            num_trimmed_blocks=num_trimmed,
            num_freed_host_blocks=len(swapper.host.pool.free) - num_free_hosts if swapper is not None else 0,
        )


def share_of(config: PoolConfig, share: float) -> int:
    """Whole usable blocks in this share of a pool."""
    return math.floor(share * config.num_usable_blocks + _ROUNDING)
