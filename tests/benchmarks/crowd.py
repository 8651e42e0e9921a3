"""Eight sessions at once over streams, as fast as they can, all driven by one client process."""

import asyncio
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.client.steps import StepItems
from tests.benchmarks.growing import Growing
from tests.benchmarks.processes import process
from tests.benchmarks.sessions import ready_session

_NUM_SESSIONS, _NUM_SEQUENCES, _NUM_STEPS, _WARM_UP = 8, 256, 320, 32


def figures() -> Iterator[dict[str, object]]:
    for num_sessions in (1, _NUM_SESSIONS):
        yield asyncio.run(_crowd(num_sessions))


async def _crowd(num_sessions: int) -> dict[str, object]:
    load = Growing(_NUM_SEQUENCES)
    num_blocks = num_sessions * load.num_blocks(_NUM_STEPS)
    limits = ["--num-blocks", str(num_blocks), "--max-sequences", str(num_sessions * _NUM_SEQUENCES)]
    with tempfile.TemporaryDirectory() as folder:
        cache = f"unix:{folder}/cache"
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", cache, "--runtime-dir", folder, *limits),
            AsyncCacheClient(cache) as client,
        ):
            sessions = [await ready_session(client, load, seed) for seed in range(num_sessions)]
            begin = time.perf_counter()
            took = await asyncio.gather(*(_drive(session, load) for session in sessions))
            seconds = time.perf_counter() - begin
            for session in sessions:
                await session.close()
    latencies = np.concatenate([times[_WARM_UP:] for times in took])
    return {
        "sessions": num_sessions,
        "sequences_each": _NUM_SEQUENCES,
        "steps_per_second": round(num_sessions * _NUM_STEPS / seconds),
        "median_us": round(float(np.median(latencies)), 1),
        "p99_us": round(float(np.percentile(latencies, 99)), 1),
    }


async def _drive(session: AsyncCacheSession, load: Growing) -> list[float]:
    took = []
    for step_idx in range(_NUM_STEPS):
        items = StepItems(**load.grow_columns(step_idx))
        begin = time.perf_counter()
        await session.step(items)
        took.append((time.perf_counter() - begin) * 1e6)
    return took
