"""The pure core alone: one step of growing sequences, from columns to columns."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from tests.benchmarks.core_pool import CorePool, microseconds
from tests.benchmarks.growing import BLOCK_SIZE, Growing

_NUM_STEPS = 320


def figures() -> Iterator[dict[str, object]]:
    for num_sequences in (1, 256, 1024):
        took, published = _step_times(Growing(num_sequences))
        yield {
            "sequences": num_sequences,
            "median_us": round(float(np.median(took)), 1),
            "p99_us": round(float(np.percentile(took, 99)), 1),
            "publish_median_us": round(float(np.median(published)), 1),
        }


def _step_times(load: Growing) -> tuple[list[float], list[float]]:
    """Of each step until its answer, and of publishing after it."""
    pool = CorePool(PoolConfig(load.num_blocks(_NUM_STEPS), BLOCK_SIZE, max_sequences=load.num_sequences))
    pool.open()
    pool.begin(load)
    took, published = [], []
    for step_idx in range(_NUM_STEPS):
        took.append(microseconds(partial(pool.take, pool.next_batch(**load.grow_columns(step_idx)))))
        published.append(microseconds(pool.publish))
    return took, published
