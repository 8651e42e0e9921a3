"""Background work of a pool, in slices between its calls: publishing, and everything that falls due with time."""

from ..pool_state import PoolState
from ..sequences.publisher import ALL_BLOCKS
from ..tiers.sequence_swap import SequenceSwapper

_SLICE_BLOCKS = 512  # forgotten in one go


class Maintenance:
    """The background work of one pool."""

    def __init__(self, state: PoolState, swapper: SequenceSwapper | None) -> None:
        self._state = state
        self._swapper = swapper

    def do_due_work(self) -> bool:
        """Ends what falls due with time: pins, claims, times to live, limits; called about once a second.

        Does as much as takes about a millisecond. Whether more is left.
        """
        state, pool, limits = self._state, self._state.pool, self._state.pool.limits
        state.revision += state.pins.expire(state.now) > 0
        state.claims.forget_stale()
        is_left = pool.reuse is not None and pool.reuse.lapse(state.now, _SLICE_BLOCKS)
        if not limits.is_on:
            state.update_pressure()
            return is_left
        before = len(state.index)
        is_left |= limits.expire(pool, _SLICE_BLOCKS) | limits.enforce(pool, _SLICE_BLOCKS)
        if self._swapper is not None:
            host = self._swapper.host.pool
            is_left |= host.limits.expire(host, _SLICE_BLOCKS)
        state.revision += len(state.index) != before
        state.update_pressure()
        return is_left

    def publish_pending(self, max_blocks: int | None = None) -> bool:
        """Publishes up to max_blocks of what steps have committed, all by default. Returns whether more is left.

        Then it evicts as much of what is above the cache's limits. A step that only commits and reserves leaves this to its
        caller, which replies first. Sessions hear of replaced table entries in their next reply. When nothing is left, the
        eviction policy does what it put off, and what was missed is counted.
        """
        state, num_most = self._state, ALL_BLOCKS if max_blocks is None else max_blocks
        is_left = state.publish(num_most)
        if state.pool.limits.is_on:
            is_left |= state.pool.limits.enforce(state.pool, num_most)
        if not is_left:
            state.pool.policy.prepare()
            state.misses.prepare()
        return is_left

    def end_reported_orders(self, max_orders: int) -> bool:
        """Continues long reports of orders that have ended, about so many of them. Returns whether any are left."""
        if self._swapper is None or not self._swapper.offloader.transfers.has_reported:
            return False
        self._state.revision += 1
        is_left = self._swapper.end_reported_orders(max_orders)
        self._state.update_pressure()
        return is_left
