"""Turns: long calls that let others pass.

Owns when a call has computed for long enough. Rules: the caller is between two whole changes of the pool when it offers a turn,
and looks again at everything that others may have changed.
"""

import asyncio
import time

PAUSE = 0.001  # seconds between two slices: a call takes a few turns of the loop, and each may meet a slice
_MOST_SECONDS = 0.001


class Turns:
    """The turns of one call, which begins to compute now."""

    def __init__(self, pause: float = PAUSE) -> None:
        """pause: seconds between two slices; 0 for a call of a few slices, which others are not to make much longer."""
        self._pause = pause
        self._began = time.perf_counter()

    @property
    def is_due(self) -> bool:
        """Whether the call has computed for about a millisecond since others could pass."""
        return time.perf_counter() - self._began > _MOST_SECONDS

    async def offer(self) -> None:
        """Lets other calls pass if a turn is due."""
        if self.is_due:
            await asyncio.sleep(self._pause)
            self._began = time.perf_counter()
