"""Admission of a prompt of 131,072 tokens, half of it cached: what its calls cost in the core, with publishing its blocks."""

import time
from collections.abc import Callable, Iterator

import numpy as np

from kvkeeper.cache_service.core.manager import PoolManager
from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from kvkeeper.cache_service.core.values.sequence_args import SequenceArgs
from kvkeeper.cache_service.core.values.step_columns import StepBatch
from kvkeeper.cache_service.core.values.types import Executor, SequenceId, SessionId

NUM_TOKENS = 131_072
BLOCK_SIZE = 16
_SLICE = 1024
_SESSION = SessionId("bench")
_TIMES = 15


def figures() -> Iterator[dict[str, object]]:
    rows = [_admit(seed) for seed in range(_TIMES)]
    medians = {name: float(np.median([row[name] for row in rows])) for name in rows[0]}
    yield {
        "tokens": NUM_TOKENS,
        "cached": NUM_TOKENS // 2,
        **{f"{name}_ms": round(value, 3) for name, value in medians.items()},
        "in_all_ms": round(medians["create"] + medians["start"], 3),
    }


def prompts(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two prompts with the same first half."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 32_000, NUM_TOKENS).astype(np.int32)
    second = first.copy()
    second[NUM_TOKENS // 2 :] = rng.integers(0, 32_000, NUM_TOKENS - NUM_TOKENS // 2)
    return first, second


def _admit(seed: int) -> dict[str, float]:
    """Milliseconds of each call."""
    config = PoolConfig(4 * NUM_TOKENS // BLOCK_SIZE, BLOCK_SIZE, max_sequences=4, max_tokens_per_sequence=NUM_TOKENS + 64)
    manager = PoolManager(config)
    manager.sessions.open(_SESSION, Executor.ENGINE)
    cached, prompt = prompts(seed)
    _create(manager, 1, cached)
    manager.steps.step(_SESSION, _start(1, 1))
    manager.steps.step(_SESSION, _commit(2, 1))
    manager.maintenance.publish_pending()
    took = {
        "create": _ms(lambda: _create(manager, 2, prompt)),
        "start": _ms(lambda: manager.steps.step(_SESSION, _start(3, 2))),
    }
    took["commit"] = _ms(lambda: manager.steps.step(_SESSION, _commit(4, 2)))
    slices = []
    is_left = True
    while is_left:
        begin = time.perf_counter()
        is_left = manager.maintenance.publish_pending(_SLICE)
        slices.append((time.perf_counter() - begin) * 1e3)
    return {**took, "publish": sum(slices), "longest_slice": max(slices)}


def _create(manager: PoolManager, sequence_id: int, tokens: np.ndarray) -> None:
    manager.creation.create(_SESSION, SequenceArgs(SequenceId(sequence_id), tokens))


def _start(step_id: int, sequence_id: int) -> StepBatch:
    most = np.array([NUM_TOKENS], np.int32)
    return StepBatch(step_id, step_id - 1, start_ids=np.array([sequence_id]), start_max_new=most, start_max_hit=most)


def _commit(step_id: int, sequence_id: int) -> StepBatch:
    return StepBatch(
        step_id,
        step_id - 1,
        commit_ids=np.array([sequence_id]),
        commit_lens=np.array([NUM_TOKENS], np.int32),
        commit_num_new=np.zeros(1, np.int32),
    )


def _ms(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3
