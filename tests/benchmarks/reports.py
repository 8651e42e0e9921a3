"""What a session's report of finished transfers costs the others: the call itself, and the longest slice of what it leaves.

A long sequence is swapped out and in again; all its orders are reported at once.
"""

import time
from collections.abc import Iterator

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch, StepReply
from kvkeeper.cache_service.core.values.types import Executor, Int64Array, SequenceId, SessionId

_SESSION, _ID = SessionId("bench"), np.array([1], np.int64)
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
    length = num_blocks * _BLOCK_SIZE
    config = PoolConfig(
        num_blocks + 8, _BLOCK_SIZE, num_host_blocks=num_blocks + 8, max_sequences=1, max_tokens_per_sequence=length
    )
    pool = _Pool(PoolManager(config))
    pool.manager.sessions.open(_SESSION, Executor.ENGINE)
    pool.manager.creation.create(_SESSION, SequenceArgs(SequenceId(1), np.arange(length, dtype=np.int32)))
    most = np.array([length], np.int32)
    pool.step(start_ids=_ID, start_max_new=most, start_max_hit=most)
    out = pool.step(commit_ids=_ID, commit_lens=most, commit_num_new=np.array([0], np.int32), swap_out_ids=_ID)
    took_out = pool.report(out.transfer_ids)
    pool.manager.prefixes.clear()
    return took_out, pool.report(pool.step(swap_in_ids=_ID).transfer_ids)


class _Pool:
    def __init__(self, manager: PoolManager) -> None:
        self.manager = manager
        self._step_id = 0

    def step(self, **columns: np.ndarray) -> StepReply:
        self._step_id += 1
        return self.manager.steps.step(_SESSION, StepBatch(self._step_id, self._step_id - 1, **columns))

    def report(self, ids: Int64Array) -> tuple[float, float]:
        begin = time.perf_counter()
        self.step(completed_transfers=ids)
        call = (time.perf_counter() - begin) * 1e6
        longest, is_left = 0.0, True
        while is_left:
            begin = time.perf_counter()
            is_left = self.manager.maintenance.end_reported_orders(_SLICE_ORDERS)
            longest = max(longest, (time.perf_counter() - begin) * 1e6)
        return call, longest
