"""The audit of a pool's orders, in whichever tier: free list and eviction order hold what the counts say.

Raises nothing and changes nothing. Each block is compared in a slice of its own moment where what is compared must hold at any;
what waits is followed from one moment on by its stamps.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ..blocks.block_pool import BlockPool
from ..eviction.policy import Order
from .slices import compare, slices

_ROWS_AT_ONCE = 64  # of about a thousand entries


def check_orders(pool: BlockPool) -> Iterator[list[str]]:
    """In slices, between which the pool may change."""
    for some in slices(pool.num_blocks):
        is_right = (pool.busy_counts[some] == pool.quarantine_counts[some] + pool.transfer_counts[some]).all()
        yield [] if is_right else ["quarantines and transfers do not add up"]
    yield from compare(
        "places in the free list",
        pool.num_blocks,
        lambda some: _is_idle(pool, some) & ~pool.indexed[some],
        lambda: [pool.free.ids()],
    )
    yield from _check_eviction_order(pool)
    if pool.reuse is not None:
        yield from _check_places(pool.num_blocks, pool.reuse.own_order(), pool.reuse.are_own)
        yield from pool.reuse.check()
    yield pool.limits.check(_is_idle(pool, slice(None)) & pool.indexed) if pool.limits.wants_order else []
    yield _check_number(pool, "evictable", pool.num_evictable, lambda some: _is_idle(pool, some) & pool.indexed[some])
    yield _check_number(pool, "referenced", pool.num_referenced, lambda some: pool.ref_counts[some])
    yield _check_number(pool, "indexed", pool.num_indexed, lambda some: pool.indexed[some])
    yield _check_number(pool, "shared", pool.num_shared, lambda some: pool.ref_counts[some] - pool.pin_counts[some] > 1)


def wrong_number(name: str, number: int, found: int) -> list[str]:
    return [] if number == found else [f"the number of {name} blocks is wrong"]


def _check_number(pool: BlockPool, name: str, number: int, find: Callable[[slice], np.ndarray]) -> list[str]:
    """Counts at one moment, a slice after the other, because fresh memory for all at once costs more than counting."""
    return wrong_number(name, number, sum(int(np.count_nonzero(find(some))) for some in slices(pool.num_blocks)))


def _check_eviction_order(pool: BlockPool) -> Iterator[list[str]]:
    """Whether those blocks wait that should, and each that waits now, and still waits when its slice comes, has one place."""
    order = pool.policy.order()
    yield []
    for some in slices(pool.num_blocks):
        waits = order.stamps.newest[some] > 0
        if pool.reuse is not None:  # what waits for a hint's sake waits there
            is_own = pool.reuse.are_own(some)
            waits = waits ^ is_own  # never in both
        is_right = np.array_equal(waits, _is_idle(pool, some) & pool.indexed[some])
        yield [] if is_right else ["the eviction policy knows of other blocks than the indexed ones that nothing holds"]
    yield from _check_places(pool.num_blocks, order, lambda some: order.stamps.newest[some] > 0)


def _check_places(num_blocks: int, order: Order, waits: Callable[[slice], npt.NDArray[np.bool_]]) -> Iterator[list[str]]:
    """Whether each block that waits in an order, and still does when its slice comes, is in it once."""
    places = np.zeros(num_blocks, np.uint8)
    yield []
    for start in range(0, len(order.rows), _ROWS_AT_ONCE):
        blocks, stamps = map(np.concatenate, zip(*order.rows[start : start + _ROWS_AT_ONCE], strict=True))
        np.add.at(places, blocks[order.stamps.are_live(blocks, stamps)], np.uint8(1))
        yield []
    for some in slices(num_blocks):
        has_waited = waits(some) & (order.stamps.newest[some] <= order.clock)
        is_right = (places[some][has_waited] == 1).all()
        yield [] if is_right else ["an evictable block is not in the eviction order once"]


def _is_idle(pool: BlockPool, some: slice) -> npt.NDArray[np.bool_]:
    """[blocks of a slice] Whether nothing holds the block; never for the null block."""
    idle = (pool.ref_counts[some] | pool.fence_counts[some] | pool.busy_counts[some]) == 0
    if not some.start:
        idle[0] = False
    return idle
