"""Whether a device waits for the host: decodes of both services on a device that takes as long for a step as an H200.

The device does nothing (timed_engine.py). Its times are those of a replay for a model of Llama-3.2-1B's shape, see docs/gpu.
`of_the_device` is how many times the device's own time a step takes: 1 where all that the host does is hidden behind it.
"""

import asyncio
from collections.abc import Iterator

import numpy as np

from tests.benchmarks.both_services import ask_all, both_services

_STEP_MS = {1: 1.3, 16: 1.35, 64: 1.6, 256: 2.4}  # by number of sequences
_NUM_TOKENS = 400
_PROMPT_TOKENS = 64


def figures() -> Iterator[dict[str, object]]:
    for num_seqs, step_ms in _STEP_MS.items():
        yield asyncio.run(_measure(num_seqs, step_ms))


async def _measure(num_seqs: int, step_ms: float) -> dict[str, object]:
    cache_flags = ("--num-pools", "1", "--num-blocks", "16384", "--max-sequences", "512")
    flags = ("--block-size", "16", "--max-sequences", "256", "--token-budget", "8192")
    engine = ("tests.benchmarks.timed_engine", str(step_ms))
    async with both_services(*flags, cache_flags=cache_flags, engine=engine) as (client, _):
        for num_tokens in (8, _NUM_TOKENS):  # the first to warm up
            drawn = np.random.default_rng(num_tokens)
            prompts = [drawn.integers(8, 400, _PROMPT_TOKENS).astype(np.int32) for _ in range(num_seqs)]
            replies = await ask_all(client, prompts, [num_tokens] * num_seqs)
    first, last = max(reply.times[0] for reply in replies), min(reply.times[-1] for reply in replies)
    between_ms = (last - first) / (_NUM_TOKENS - 1) * 1e3
    return {
        "sequences": num_seqs,
        "device_ms": step_ms,
        "step_ms": round(between_ms, 3),
        "of_the_device": round(between_ms / step_ms, 3),
        "tokens_per_second": round(num_seqs / between_ms * 1e3),
    }
