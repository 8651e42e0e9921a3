"""Admission of a prompt of 131,072 tokens, half of it cached: what its calls cost in the core, with publishing its blocks."""

from collections.abc import Iterator

import numpy as np

from kvkeeper.cache_service.core.values.pool_config import PoolConfig
from tests.benchmarks.core_pool import CorePool, microseconds

NUM_TOKENS = 131_072
BLOCK_SIZE = 16
_SLICE = 1024
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
    pool = CorePool(config)
    pool.open()
    cached, prompt = prompts(seed)
    pool.create(1, cached)
    pool.start(1, NUM_TOKENS)
    pool.commit(1, NUM_TOKENS)
    pool.publish()
    calls = {
        "create": lambda: pool.create(2, prompt),
        "start": lambda: pool.start(2, NUM_TOKENS),
        "commit": lambda: pool.commit(2, NUM_TOKENS),
    }
    took = {name: microseconds(call) / 1e3 for name, call in calls.items()}
    slices, is_left = list[float](), True

    def publish_slice() -> None:
        nonlocal is_left
        is_left = pool.manager.maintenance.publish_pending(_SLICE)

    while is_left:
        slices.append(microseconds(publish_slice) / 1e3)
    return {**took, "publish": sum(slices), "longest_slice": max(slices)}
