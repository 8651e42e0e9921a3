"""What a session's report of finished transfers costs the others: the call itself, and the longest slice of what it leaves.

A long sequence is swapped out and in again; all its orders are reported at once.
"""

from collections.abc import Iterator

import numpy as np

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.types import Int64Array
from tests.benchmarks.core_pool import CorePool, microseconds

_ID = np.array([1], np.int64)
_BLOCK_SIZE, _SLICE_ORDERS, _NUM_ROUNDS = 16, 512, 9


def figures() -> Iterator[dict[str, object]]:
    for num_blocks in (512, 2048, 8192):
        took = [_round(num_blocks) for _ in range(_NUM_ROUNDS)]
        for name, column in (("swap-out", 0), ("swap-in", 1)):
            calls, slices = zip(*(of_round[column] for of_round in took), strict=True)
            yield {
                "reported": f"{num_blocks} blocks of a {name}",
                "call_median_us": round(float(np.median(calls)), 1),
                "longest_slice_median_us": round(float(np.median(slices)), 1),
            }


def _round(num_blocks: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """(call, longest slice) in microseconds, of the report of a swap-out and of a swap-in."""
    length, num_all = num_blocks * _BLOCK_SIZE, num_blocks + 8
    pool = CorePool(PoolConfig(num_all, _BLOCK_SIZE, num_host_blocks=num_all, max_sequences=1, max_tokens_per_sequence=length))
    pool.open()
    pool.create(1, np.arange(length, dtype=np.int32))
    pool.start(1, length)
    took_out = _report(pool, pool.commit(1, length, swap_out_ids=_ID).transfer_ids)
    pool.manager.prefixes.clear()
    return took_out, _report(pool, pool.step(swap_in_ids=_ID).transfer_ids)


def _report(pool: CorePool, ids: Int64Array) -> tuple[float, float]:
    call, slices, is_left = microseconds(lambda: pool.step(completed_transfers=ids)), list[float](), True

    def end_slice() -> None:
        nonlocal is_left
        is_left = pool.manager.maintenance.end_reported_orders(_SLICE_ORDERS)

    while is_left:
        slices.append(microseconds(end_slice))
    return call, max(slices)
