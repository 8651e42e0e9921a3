"""Calls that make room: evictions to a target, and the blocks that they demote."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..pool_state import PoolState
from ..sequences.publisher import ALL_BLOCKS
from ..step.reply import order_columns
from ..tiers.sequence_swap import SequenceSwapper
from ..tiers.transfers import TransferOrder
from ..values.copies import Copies
from ..values.types import NO_INT32, Executor, SessionId


@dataclass(slots=True)
class Demotion:
    """What evictions moved to the host tier instead of forgetting it; copies are to be run before anything else."""

    num_blocks: int = 0
    copies: Copies = field(default_factory=lambda: Copies(NO_INT32, NO_INT32))


class EvictionCalls:
    """Makes room in one pool."""

    def __init__(self, state: PoolState, swapper: SequenceSwapper | None) -> None:
        self._state = state
        self._pool = state.pool
        self._blocks_left = state.blocks_left
        self._swapper = swapper

    def evict_blocks(self, num_free_blocks: int, at_most: int = ALL_BLOCKS) -> int:
        """Evicts until so many blocks are free, or nothing more can be evicted. Returns how many were."""
        return self._evict(min(num_free_blocks - len(self._pool.free), at_most))

    def evict_count(self, num_blocks: int) -> int:
        """Evicts so many cached blocks, or all. Returns how many were."""
        return self._evict(num_blocks)

    def evict_to(self, max_utilization: float, at_most: int = ALL_BLOCKS) -> int:
        """Evicts until at most this share of the pool is held or cached, as far as that can be. Returns how many were."""
        return self._evict(min(self._blocks_left.num_filled_above(max_utilization), at_most))

    def evict_excess(self, max_blocks: int) -> int:
        """Evicts at most so many of the cached blocks above the configured share. Returns how many were.

        For the time between steps, so that the next one finds its blocks free.
        """
        share = self._state.config.evict_above
        return self._evict(min(self._blocks_left.num_filled_above(share), max_blocks)) if share < 1 else 0

    def evict_ahead(self, max_blocks: int) -> int:
        """Evicts at most so many blocks, until as many are free as the next steps may want. Returns how many were.

        For the time between steps, too. In a pool with a host tier nothing: there an eviction is an order of a step.
        """
        state = self._state
        if state.lower_tier is not None:
            return 0
        return self._evict(min(state.room_ahead.num_blocks - len(self._pool.free), max_blocks), is_ahead=True)

    @contextmanager
    def demoting(self, session: SessionId) -> Iterator[Demotion]:
        """What is evicted inside is moved to the host tier, if the session's orders are run by the cache service.

        Other sessions hear of orders with a step only: for them it is forgotten.
        """
        owner, swapper, result = self._state.session(session), self._swapper, Demotion()
        if swapper is None or owner.executor is Executor.ENGINE:
            yield result
            return
        orders: list[TransferOrder] = []
        before = swapper.offloader.num_demoted
        swapper.begin_call(owner, orders, is_asked=True)
        yield result
        swapper.finish_call(owner)
        result.num_blocks, result.copies = (
            swapper.offloader.num_demoted - before,
            Copies(NO_INT32, NO_INT32, *order_columns(orders)),
        )

    def _evict(self, count: int, *, is_ahead: bool = False) -> int:
        count = min(max(count, 0), self._pool.num_evictable)
        if count:
            self._state.revision += 1
            self._pool.evict(count, is_ahead=is_ahead)
        return count
