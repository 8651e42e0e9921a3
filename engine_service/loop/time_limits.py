"""Time limits of requests: their own time-out, and the engine's for requests that run and make no progress.

A request that makes progress may take any time, unless its client set a limit. Either way the client keeps what was generated.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Generic, TypeVar

import structlog

from ..outputs.generation import Generation
from ..values.errors import Stalled, TimedOut
from ..values.request import FinishReason
from .engine import Engine

log = structlog.get_logger()
K = TypeVar("K", bound=Hashable)

NUM_LOOKS = 8  # without progress until a request counts as stalled


def within(timeout_ms: int | None) -> AbstractAsyncContextManager[None]:
    """Limits what a request waits for before it is queued. Raises TimedOut that many milliseconds later; None: no limit."""
    return nullcontext() if timeout_ms is None else _within(timeout_ms)


@asynccontextmanager
async def _within(timeout_ms: int) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_ms / 1000) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise _timed_out(timeout_ms) from None


def limit_time(generation: Generation, timeout_ms: int) -> None:
    """End a request that many milliseconds after its start. Called on the loop."""
    error = _timed_out(timeout_ms)
    end = asyncio.get_running_loop().call_later
    left = generation.started_at + timeout_ms / 1000 - time.monotonic()
    generation.timer = end(max(left, 0.0), generation.cut_short, FinishReason.TIMED_OUT, error)


def _timed_out(timeout_ms: int) -> TimedOut:
    return TimedOut(f"no token came within timeout_ms (--timeout-ms), {timeout_ms} ms", timeout_ms=timeout_ms)


async def end_stalled(engine: Engine, stall_timeout: float) -> None:
    """End requests that run and make no progress for so many seconds. Runs until it is cancelled."""
    watch = StallWatch[Generation]()
    text = f"no progress for {stall_timeout:g} s (--stall-timeout of the engine)"
    while True:
        await asyncio.sleep(stall_timeout / NUM_LOOKS)
        for generation in watch.look(engine.requests.progress() if engine.memory is not None else {}):
            log.warning("request_stalled", request_id=generation.request.request_id, seconds=stall_timeout)
            generation.cut_short(FinishReason.STALLED, Stalled(text, flag="--stall-timeout"))


class StallWatch(Generic[K]):
    """Finds requests without progress. It counts looks, not time: a process that was stopped for an hour has missed looks, so
    its requests go on.
    """

    def __init__(self) -> None:
        self._seen: dict[K, tuple[object, int]] = {}  # progress, and for how many looks it has been the same

    def look(self, progress: Mapping[K, object]) -> list[K]:
        """The keys whose progress stayed the same for NUM_LOOKS looks after the first. A key that is left out starts anew."""
        seen, self._seen = self._seen, {}
        for key, now in progress.items():
            before, num_looks = seen.get(key, (None, 0))
            self._seen[key] = (now, num_looks + 1 if before == now else 0)
        return [key for key, (_, num_looks) in self._seen.items() if num_looks >= NUM_LOOKS]
