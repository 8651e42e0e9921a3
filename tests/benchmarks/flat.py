"""The same step in pools of 1e4 to 1e7 blocks, all of them cached; statistics; what a cached block weighs; a session of 10,000.

Steps of the pools alternate, so that all meet the same machine. Blocks are cached by long sequences that were computed and
released; then the measured sequences grow by evicting.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId
from tests.benchmarks.growing import BLOCK_SIZE, Growing

_SESSION = SessionId("bench")
_NUM_SEQUENCES, _NUM_STEPS, _WARM_UP = 256, 480, 32
_FILLER_TOKENS = 65_536


def figures() -> Iterator[dict[str, object]]:
    pools = {num_blocks: _Pool(num_blocks) for num_blocks in (10_000, 100_000, 1_000_000, 10_000_000)}
    took: dict[int, list[float]] = {num_blocks: [] for num_blocks in pools}
    for step_idx in range(_NUM_STEPS):
        for num_blocks, pool in pools.items():
            took[num_blocks].append(pool.step(step_idx))
    medians = {num_blocks: float(np.median(times[_WARM_UP:])) for num_blocks, times in took.items()}
    for num_blocks in pools:
        yield {
            "blocks": num_blocks,
            "sequences": _NUM_SEQUENCES,
            "median_us": round(medians[num_blocks], 1),
            "p99_us": round(float(np.percentile(took[num_blocks][_WARM_UP:], 99)), 1),
            "ratio": round(float(np.median(np.array(took[num_blocks][_WARM_UP:]) / took[10_000][_WARM_UP:])), 3),
            "stats_us": round(pools[num_blocks].stats(), 1),
        }
    # Of the largest, in which what a pool costs anyway, and memory that was given back before, weigh nothing.
    yield {"blocks": 10_000_000, "bytes_per_cached_block": round(pools[10_000_000].bytes_per_block, 1)}
    yield _crowded_session()


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


class _Pool:
    """A full pool in which _NUM_SEQUENCES sequences grow."""

    def __init__(self, num_blocks: int) -> None:
        self._load = Growing(_NUM_SEQUENCES)
        before = _resident_bytes()
        config = PoolConfig(
            num_blocks + 1, BLOCK_SIZE, max_sequences=_NUM_SEQUENCES, max_tokens_per_sequence=_FILLER_TOKENS, watermark=0.0
        )
        self._manager = PoolManager(config)
        self._manager.sessions.open(_SESSION, Executor.ENGINE)
        self._step_id = 0
        self._fill(num_blocks)
        self.bytes_per_block = (_resident_bytes() - before) / num_blocks
        for sequence_id, prompt in zip(self._load.ids.tolist(), self._load.prompts(), strict=True):
            self._manager.creation.create(_SESSION, SequenceArgs(SequenceId(sequence_id), prompt))
        self._step(**self._load.start_columns())

    def stats(self) -> float:
        """Microseconds of the pool's statistics, the least of ten."""
        return min(_timed(self._manager.queries.stats) for _ in range(10))

    def step(self, step_idx: int) -> float:
        """Microseconds of one step of all sequences; what it leaves for later is not among them."""
        columns = self._load.grow_columns(step_idx)
        begin = time.perf_counter()
        self._step(**columns)
        took = (time.perf_counter() - begin) * 1e6
        self._manager.maintenance.publish_pending()
        return took

    def _step(self, **columns: np.ndarray) -> None:
        self._step_id += 1
        self._manager.steps.step(_SESSION, StepBatch(self._step_id, self._step_id - 1, **columns))

    def _fill(self, num_blocks: int) -> None:
        """Caches so many blocks: one long sequence after the other, in the same slot."""
        rng = np.random.default_rng(0)
        left = num_blocks * BLOCK_SIZE
        while left:
            count = min(left, _FILLER_TOKENS)
            left -= count
            tokens, length = rng.integers(0, 32_000, count).astype(np.int32), np.array([count], np.int32)
            self._manager.creation.create(_SESSION, SequenceArgs(SequenceId(1), tokens))
            one = np.array([1])
            self._step(start_ids=one, start_max_new=length, start_max_hit=np.zeros(1, np.int32))
            self._step(commit_ids=one, commit_lens=length, commit_num_new=np.zeros(1, np.int32))
            self._step(release_ids=one)


def _crowded_session() -> dict[str, object]:
    """A step of 1,024 sequences in a session that has 10,000."""
    load, num_all = Growing(1024), 10_000
    config = PoolConfig(load.num_blocks(_NUM_STEPS) + num_all, BLOCK_SIZE, max_sequences=num_all, max_tokens_per_sequence=4096)
    manager = PoolManager(config)
    manager.sessions.open(_SESSION, Executor.ENGINE)
    before = _resident_bytes()
    for sequence_id, prompt in zip(load.ids.tolist(), load.prompts(), strict=True):
        manager.creation.create(_SESSION, SequenceArgs(SequenceId(sequence_id), prompt))
    others = np.arange(len(load.ids) + 1, num_all + 1)
    for sequence_id in others.tolist():
        manager.creation.create(_SESSION, SequenceArgs(SequenceId(sequence_id), np.array([sequence_id], np.int32)))
    manager.steps.step(_SESSION, StepBatch(1, 0, **load.start_columns()))
    most = np.ones(len(others), np.int32)
    manager.steps.step(_SESSION, StepBatch(2, 1, start_ids=others, start_max_new=most, start_max_hit=most))
    took = []
    for step_idx in range(_NUM_STEPS):
        batch = StepBatch(step_idx + 3, step_idx + 2, **load.grow_columns(step_idx))
        begin = time.perf_counter()
        manager.steps.step(_SESSION, batch)
        took.append((time.perf_counter() - begin) * 1e6)
        manager.maintenance.publish_pending()
    return {
        "live_sequences": num_all,
        "sequences": 1024,
        "median_us": round(float(np.median(took)), 1),
        "p99_us": round(float(np.percentile(took, 99)), 1),
        "bytes_per_live_sequence": round((_resident_bytes() - before) / num_all),
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
