"""Steps on a pool of which every block is cached, so that each block granted is one evicted; LRU and `adaptive` side by side.

`grow`: 256 sequences grow by a token a step, staggered, so that 16 blocks are evicted each step. `turnover`: the same, and one
of them ends each step while another begins: the one that ended left half of the new prompt cached. Both policies take the
same steps in turn, a few dozen at a time. `ratio` compares CPU time, all of it: what is put off until a step is answered
counts, what other processes do does not. Medians and percentiles are of single steps, by the clock, until they are answered.
"""

import time
from collections.abc import Iterator

import numpy as np

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.step_columns import StepBatch
from kvkeeper.cache_service.core.values.types import Executor
from tests.benchmarks.core_pool import CorePool

_POLICIES = ("lru", "adaptive")
_POOLS = (10_000, 100_000, 1_000_000)
_NUM_SEQUENCES = 256
_ROUND = 32
_BLOCK_SIZE = 16
_FILL_LEN = 128 * _BLOCK_SIZE
_PROMPT_LEN = 16 * _BLOCK_SIZE

Job = tuple[tuple[int, np.ndarray] | None, StepBatch]  # the sequence that it creates


def figures() -> Iterator[dict[str, object]]:
    for num_blocks in _POOLS:
        pools = [_FullPool(num_blocks, policy) for policy in _POLICIES]
        for name, next_job, num_rounds in (("turnover", _FullPool.turn_over, 48), ("grow", _FullPool.grow, 4)):
            rounds = [[pool.run([next_job(pool) for _ in range(_ROUND)]) for pool in pools] for _ in range(num_rounds)]
            yield {"blocks": num_blocks, "step": name, **_figure(rounds)}


def _figure(rounds: list[list[tuple[float, list[float]]]]) -> dict[str, object]:
    """rounds [rounds][policies] of CPU seconds and the seconds of each step."""
    row: dict[str, object] = {}
    cpu = np.array([[cpu_s for cpu_s, _ in both] for both in rounds])
    for column, policy in enumerate(_POLICIES):
        steps = np.concatenate([both[column][1] for both in rounds]) * 1e6
        row[f"{policy}_cpu_us"] = round(float(cpu[:, column].mean()) * 1e6 / _ROUND, 1)
        row[f"{policy}_median_us"] = round(float(np.median(steps)), 1)
        row[f"{policy}_p99_us"] = round(float(np.percentile(steps, 99)), 1)
    row["ratio"] = round(float(np.median(cpu[:, 1] / cpu[:, 0])), 3)
    return row


class _FullPool:
    """One pool and its live sequences. All instances see the same prompts and tokens."""

    def __init__(self, num_blocks: int, policy: str) -> None:
        self._rng = np.random.default_rng(0)
        self._core = CorePool(PoolConfig(num_blocks, _BLOCK_SIZE, _NUM_SEQUENCES + 1, watermark=0, eviction_policy=policy))
        self._core.open(Executor.CACHE)
        self._last_id = 0
        self._ids = np.zeros(_NUM_SEQUENCES, np.int64)
        self._lens = np.zeros(_NUM_SEQUENCES, np.int32)
        self._prompts: list[np.ndarray] = []
        while len(self._core.manager.state.pool.free) > 0:
            self._run_once(self._tokens(_FILL_LEN))
        for at in range(_NUM_SEQUENCES):
            self._do(self._new(at, self._tokens(_PROMPT_LEN - at % _BLOCK_SIZE)), self._core.next_batch(**self._start(at)))
        for _ in range(2 * _NUM_SEQUENCES):
            self._do(*self.turn_over())

    def run(self, jobs: list[Job]) -> tuple[float, list[float]]:
        """CPU seconds for all, and seconds for each."""
        took = []
        begin = time.process_time()
        for job in jobs:
            step_begins = time.perf_counter()
            self._do(*job)
            took.append(time.perf_counter() - step_begins)
            self._core.publish()
        return time.process_time() - begin, took

    def grow(self) -> Job:
        """A step in which all sequences grow."""
        return None, self._core.next_batch(**self._growth(np.arange(_NUM_SEQUENCES)))

    def turn_over(self) -> Job:
        """A step in which one ends, one begins, and the others grow; the new one's creation counts with it."""
        at = self._last_id % _NUM_SEQUENCES
        ended = np.array([self._ids[at]])
        others = np.delete(np.arange(_NUM_SEQUENCES), at)
        prompt = self._tokens(_PROMPT_LEN)
        prompt[: _PROMPT_LEN // 2] = self._prompts[0][: _PROMPT_LEN // 2]
        created = self._new(at, prompt)
        return created, self._core.next_batch(release_ids=ended, **self._growth(others), **self._start(at))

    def _run_once(self, prompt: np.ndarray) -> None:
        self._do(self._new(0, prompt), self._core.next_batch(**self._start(0)))
        length = np.array([len(prompt)], np.int32)
        self._do(None, self._core.next_batch(commit_ids=self._ids[:1], commit_lens=length, commit_num_new=0 * length))
        self._do(None, self._core.next_batch(release_ids=self._ids[:1]))

    def _do(self, created: tuple[int, np.ndarray] | None, batch: StepBatch) -> None:
        if created is not None:
            self._core.create(*created)
        reply = self._core.take(batch)
        assert np.array_equal(reply.reserve_reserved, batch.reserve_max), "a refused step is not the one to be measured"

    def _new(self, at: int, prompt: np.ndarray) -> tuple[int, np.ndarray]:
        self._last_id += 1
        self._ids[at], self._lens[at] = self._last_id, len(prompt)
        self._prompts = [*self._prompts[-_NUM_SEQUENCES:], prompt]
        return self._last_id, prompt

    def _start(self, at: int) -> dict[str, np.ndarray]:
        most = self._lens[at : at + 1].copy()
        return {"start_ids": self._ids[at : at + 1].copy(), "start_max_new": most, "start_max_hit": most}

    def _growth(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Each commits what it computed, with one token more, which it reserves a slot for."""
        ids, lens = self._ids[rows], self._lens[rows]
        self._lens[rows] += 1
        return {
            "commit_ids": ids,
            "commit_lens": lens,
            "commit_num_new": np.ones(len(rows), np.int32),
            "commit_tokens": self._tokens(len(rows)),
            "reserve_ids": ids,
            "reserve_min": lens + 1,
            "reserve_max": lens + 1,
        }

    def _tokens(self, count: int) -> np.ndarray:
        return self._rng.integers(0, 32_000, count).astype(np.int32)
