"""What ends requests that take too long: their own time-out, and the engine's for those that run and make no progress.

A request that makes progress may take as long as it takes, unless its client said otherwise. Both ends give what was made.
"""

import asyncio
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

import structlog

from ..outputs.generation import Generation
from ..values.errors import Stalled, TimedOut
from ..values.request import FinishReason
from .engine import Engine

log = structlog.get_logger()
K = TypeVar("K", bound=Hashable)

NUM_LOOKS = 8  # without progress until a request counts as stalled


def limit_time(generation: Generation, timeout_ms: int) -> None:
    """Ends a request so long after now. Called on the loop."""
    refusal = TimedOut(f"no token came within timeout_ms (--timeout-ms), {timeout_ms} ms", timeout_ms=timeout_ms)
    end = asyncio.get_running_loop().call_later
    generation.timer = end(timeout_ms / 1000, generation.cut_short, FinishReason.TIMED_OUT, refusal)


async def end_stalled(engine: Engine, stall_timeout: float) -> None:
    """Ends requests that run and make no progress for so many seconds. Runs until it is cancelled."""
    watch = StallWatch[Generation]()
    text = f"no progress for {stall_timeout:g} s (--stall-timeout of the engine)"
    while True:
        await asyncio.sleep(stall_timeout / NUM_LOOKS)
        for generation in watch.look(engine.requests.progress() if engine.memory is not None else {}):
            log.warning("request_stalled", request_id=generation.request.request_id, seconds=stall_timeout)
            generation.cut_short(FinishReason.STALLED, Stalled(text, flag="--stall-timeout"))


class StallWatch(Generic[K]):
    """Which of those that it is shown make no progress. It counts looks, not time: a process that was stopped for an hour has
    missed looks, and its requests go on.
    """

    def __init__(self) -> None:
        self._seen: dict[K, tuple[object, int]] = {}  # progress, and looks at which it was just that

    def look(self, progress: Mapping[K, object]) -> list[K]:
        """Those whose progress was the same at NUM_LOOKS looks behind the first. What is not shown starts anew."""
        seen, self._seen = self._seen, {}
        for key, now in progress.items():
            before, num_looks = seen.get(key, (None, 0))
            self._seen[key] = (now, num_looks + 1 if before == now else 0)
        return [key for key, (_, num_looks) in self._seen.items() if num_looks >= NUM_LOOKS]
