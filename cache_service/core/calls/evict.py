"""Calls that make room: evictions to a target, with what they demote, and clearing the prefix cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from ..step.apply import StepApplier
from ..step.reply import copies_from
from ..tiers.transfers import TransferOrder
from ..values.copies import Copies
from ..values.types import NO_INT32, Executor, SequenceState, SessionId
from .garbage import share_of


class ClearResult(NamedTuple):
    """What clearing the prefix cache did."""

    num_freed_blocks: int
    num_forgotten_blocks: int


@dataclass(slots=True)
class Demotion:
    """What evictions moved to the host tier instead of forgetting it; copies are to be run before anything else."""

    num_blocks: int = 0
    copies: Copies = field(default_factory=lambda: Copies(NO_INT32, NO_INT32))


class EvictionCalls(StepApplier):
    """See the module."""

    def clear_prefix_cache(self) -> ClearResult:
        """Forgets every cached block that nothing holds; blocks in use lose their index entry, and pins end.

        What runs is published anew, from its first block: some of it may never be committed again, and others wait for it.
        """
        self.revision += 1
        self.tables.pins.clear()
        result = ClearResult(*self.tables.publisher.clear_index())
        if self.config.prefix_caching:
            for owner in self._owners.values():
                slots = owner.ids.items()[1]
                self.tables.publisher.note(owner, slots[self.tables.sequences.states[slots] == SequenceState.RUNNING])
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
        owner, swapper, result = self._owner(session), self.tables.swapper, Demotion()
        if swapper is None or owner.executor is Executor.ENGINE:
            yield result
            return
        orders: list[TransferOrder] = []
        before = swapper.offloader.num_demoted
        swapper.begin(owner, orders)
        yield result
        swapper.finish(owner)
        result.num_blocks, result.copies = swapper.offloader.num_demoted - before, copies_from([], [], orders)

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
