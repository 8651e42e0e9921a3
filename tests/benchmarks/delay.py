"""How long a session waits for what another one does: admit 131,072 tokens, end with 1e6 blocks, or ask about a full pool.

The other session lives in a process of its own. Delays are those of the service: the longest step while it happens, beside
the longest of as many steps while nothing does.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from kvkeeper.client.cache import AsyncCacheClient
from kvkeeper.client.session import AsyncCacheSession
from kvkeeper.client.steps import StepItems
from tests.benchmarks.disturber import NUM_BLOCKS, NUM_LISTED, NUM_SEQUENCES, NUM_TOKENS
from tests.benchmarks.growing import Growing
from tests.benchmarks.processes import process, start_child, tell_child
from tests.benchmarks.sessions import ready_session

_LOAD = Growing(64)
_PAUSE = 0.001  # seconds: what a device would take


def figures() -> Iterator[dict[str, object]]:
    yield from asyncio.run(_measure())


async def _measure() -> list[dict[str, object]]:
    limits = ["--num-blocks", str(NUM_BLOCKS), "--max-sequences", str(max(NUM_SEQUENCES, NUM_LISTED) + 128)]
    limits += ["--max-tokens-per-sequence", str(NUM_TOKENS + 64)]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        cache = f"unix:{folder}/cache"
        async with (
            process("-m", "kvkeeper.cache_service", "--listen", cache, "--runtime-dir", folder, *limits),
            AsyncCacheClient(cache) as client,
        ):
            steady = Steady(await ready_session(client, _LOAD, 0))
            for what in ("admission", "reclaim", "stats", "list", "evict", "audit", "clear"):
                other = await start_child("-m", "tests.benchmarks.disturber", cache, what)
                quiet = await steady.step_until(asyncio.create_task(asyncio.sleep(1.0)))
                happening = asyncio.create_task(tell_child(other))
                busy = await steady.step_until(happening)
                rows.append({
                    "while": what,
                    "its_seconds": round(float(happening.result()), 3),
                    "median_us": round(float(np.median(busy))),
                    "p99_us": round(float(np.percentile(busy, 99))),
                    "longest_us": round(max(busy)),
                    "steps": len(busy),
                    "quiet_median_us": round(float(np.median(quiet))),
                    "quiet_p99_us": round(float(np.percentile(quiet, 99))),
                    "quiet_longest_us": round(max(quiet)),
                })  # fmt: skip
                await other.wait()
    return rows


class Steady:
    """A session that steps as an engine does."""

    def __init__(self, session: AsyncCacheSession) -> None:
        self._session = session
        self._step_idx = 0

    async def step_until(self, event: "asyncio.Task[object]") -> list[float]:
        """Microseconds of each step until the event, and of some after it."""
        took = []
        left = 300
        while left:
            left -= event.done()
            items = StepItems(**_LOAD.grow_columns(self._step_idx))
            self._step_idx += 1
            begin = time.perf_counter()
            await self._session.step(items)
            took.append((time.perf_counter() - begin) * 1e6)
            await asyncio.sleep(_PAUSE)
        return took
