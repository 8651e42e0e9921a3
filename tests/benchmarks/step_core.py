"""The pure core alone: one step of growing sequences, from columns to columns."""

import time
from collections.abc import Iterator

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId
from tests.benchmarks.growing import BLOCK_SIZE, Growing

_NUM_STEPS = 320
_SESSION = SessionId("bench")


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
    config = PoolConfig(load.num_blocks(_NUM_STEPS), BLOCK_SIZE, max_sequences=load.num_sequences)
    manager = PoolManager(config)
    manager.sessions.open(_SESSION, Executor.ENGINE)
    for sequence_id, prompt in zip(load.ids.tolist(), load.prompts(), strict=True):
        manager.creation.create(_SESSION, SequenceArgs(SequenceId(sequence_id), prompt))
    manager.steps.step(_SESSION, StepBatch(1, 0, **load.start_columns()))
    took, published = [], []
    for step_idx in range(_NUM_STEPS):
        batch = StepBatch(step_idx + 2, step_idx + 1, **load.grow_columns(step_idx))
        begin = time.perf_counter()
        manager.steps.step(_SESSION, batch)
        middle = time.perf_counter()
        manager.maintenance.publish_pending()
        took.append((middle - begin) * 1e6)
        published.append((time.perf_counter() - middle) * 1e6)
    return took, published
