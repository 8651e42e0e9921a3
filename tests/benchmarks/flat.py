"""The same step in pools of 1e4 to 1e7 blocks, all of them cached; statistics; what a cached block weighs; a session of 10,000.

Steps of the pools alternate, so that all meet the same machine. Blocks are cached by long sequences that were computed and
released; then the measured sequences grow by evicting.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from tests.benchmarks.core_pool import CorePool, microseconds
from tests.benchmarks.growing import BLOCK_SIZE, Growing

_NUM_SEQUENCES, _NUM_STEPS, _WARM_UP = 256, 480, 32
_FILLER_TOKENS = 65_536


def figures() -> Iterator[dict[str, object]]:
    pools = {num_blocks: _Pool.full(num_blocks) for num_blocks in (10_000, 100_000, 1_000_000, 10_000_000)}
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


class _Pool:
    """A full pool in which sequences grow, in a session that may have others."""

    def __init__(self, config: PoolConfig, load: Growing, num_cached: int = 0, num_others: int = 0) -> None:
        self._load, before = load, _resident_bytes()
        self._core = CorePool(config)
        self._core.open()
        self._fill(num_cached)
        self.bytes_per_block = (_resident_bytes() - before) / max(num_cached, 1)
        self._core.begin(load)
        if num_others:
            others = np.arange(len(load.ids) + 1, len(load.ids) + num_others + 1)
            for sequence_id in others.tolist():
                self._core.create(sequence_id, np.array([sequence_id], np.int32))
            most = np.ones(num_others, np.int32)
            self._core.step(start_ids=others, start_max_new=most, start_max_hit=most)

    @classmethod
    def full(cls, num_blocks: int) -> "_Pool":
        config = PoolConfig(num_blocks + 1, BLOCK_SIZE, _NUM_SEQUENCES, _FILLER_TOKENS, watermark=0.0)
        return cls(config, Growing(_NUM_SEQUENCES), num_blocks)

    def stats(self) -> float:
        """Microseconds of the pool's statistics, the least of ten."""
        return min(microseconds(self._core.manager.queries.stats) for _ in range(10))

    def step(self, step_idx: int) -> float:
        """Microseconds of one step of all sequences; what it leaves for later is not among them."""
        took = microseconds(partial(self._core.step, **self._load.grow_columns(step_idx)))
        self._core.publish()
        return took

    def _fill(self, num_blocks: int) -> None:
        """Caches so many blocks: one long sequence after the other, in the same slot."""
        rng = np.random.default_rng(0)
        left = num_blocks * BLOCK_SIZE
        while left:
            count = min(left, _FILLER_TOKENS)
            left -= count
            self._core.create(1, rng.integers(0, 32_000, count).astype(np.int32))
            self._core.start(1, count, max_hit=0)
            self._core.commit(1, count)
            self._core.step(release_ids=np.array([1]))


def _crowded_session() -> dict[str, object]:
    """A step of 1,024 sequences in a session that has 10,000."""
    load, num_all, before = Growing(1024), 10_000, _resident_bytes()
    config = PoolConfig(load.num_blocks(_NUM_STEPS) + num_all, BLOCK_SIZE, num_all, 4096)
    pool = _Pool(config, load, num_others=num_all - 1024)
    took = [pool.step(step_idx) for step_idx in range(_NUM_STEPS)]
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
