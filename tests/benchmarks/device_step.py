"""Whether a device waits for the host: both services on a device that takes as long for a step as an H200.

The device does nothing (timed_engine.py). Its times are those of a replay for a model of Llama-3.2-1B's shape, see docs/gpu.
`of_the_device` is how many times the device's own time a step of decodes takes: 1 where all that the host does is hidden behind
it. `processor_ms_per_step` says what that is, by process, and of the engine by its loop and its other threads. A burst's first
tokens come with prompts that the device needs `prompts_ms` for.
"""

import asyncio
import os
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvkeeper.client import AsyncEngineClient
from tests.benchmarks.both_services import Reply, ask_all, both_services, step_seconds
from tests.benchmarks.timed_engine import PROMPT_TOKEN_S

_STEP_MS = {1: 1.3, 16: 1.5, 64: 1.5, 256: 2.4}  # by number of sequences
_NUM_TOKENS = 1000
_PROMPT_TOKENS = 128
_SETTLED_S = 0.5  # until none of a burst is a prompt any more
_PARTS = {"cache_service": "cache", "timed_engine": "engine", "front_main": "front"}  # by what the command names


def figures() -> Iterator[dict[str, object]]:
    for num_seqs, step_ms in _STEP_MS.items():
        yield asyncio.run(_measure(num_seqs, step_ms))


async def _measure(num_seqs: int, step_ms: float) -> dict[str, object]:
    cache_flags = ("--num-pools", "1", "--num-blocks", "32768", "--max-sequences", "512")
    flags = ("--block-size", "16", "--max-sequences", "256")
    engine = ("tests.benchmarks.timed_engine", str(step_ms))
    async with both_services(*flags, cache_flags=cache_flags, engine=engine) as (client, _):
        await _load(client, num_seqs, 8)  # to warm up
        loading = asyncio.create_task(_load(client, num_seqs, _NUM_TOKENS))
        await asyncio.sleep(_SETTLED_S)
        before, num_before = _spent(), (await client.stats()).num_steps
        await asyncio.sleep(_NUM_TOKENS * step_ms / 1e3 / 3)
        spent, num_steps = _spent() - before, (await client.stats()).num_steps - num_before
        replies = await loading
    between_ms, firsts = step_seconds(replies) * 1e3, [reply.first_token_seconds * 1e3 for reply in replies]
    return {
        "sequences": num_seqs,
        "device_ms": step_ms,
        "step_ms": round(between_ms, 3),
        "of_the_device": round(between_ms / step_ms, 3),
        "tokens_per_second": round(num_seqs / between_ms * 1e3),
        "processor_ms_per_step": {part: round(seconds / num_steps * 1e3, 3) for part, seconds in sorted(spent.items())},
        "prompts_ms": round(num_seqs * _PROMPT_TOKENS * PROMPT_TOKEN_S * 1e3, 1),
        "first_token_p50_ms": round(statistics.median(firsts), 1),
        "all_begun_ms": round(max(firsts), 1),
    }


async def _load(client: AsyncEngineClient, num_seqs: int, num_tokens: int) -> list[Reply]:
    drawn = np.random.default_rng(num_tokens)
    prompts = [drawn.integers(8, 400, _PROMPT_TOKENS).astype(np.int32) for _ in range(num_seqs)]
    return await ask_all(client, prompts, [num_tokens] * num_seqs)


def _spent() -> Counter[str]:
    """Processor seconds of this process and of all below it, by part."""
    found = Counter[str]()
    for pid in (os.getpid(), *_below(os.getpid())):
        command = Path(f"/proc/{pid}/cmdline").read_text()
        part = next((part for word, part in _PARTS.items() if word in command), "client")
        for task in Path(f"/proc/{pid}/task").iterdir():
            is_loop = part == "engine" and int(task.name) == pid
            found[f"{part}_loop" if is_loop else part] += int((task / "schedstat").read_text().split()[0]) / 1e9  # type: ignore[assignment]
    return found


def _below(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield int(child)
            yield from _below(int(child))
