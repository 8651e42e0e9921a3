"""Timeouts by a clock that is handed in, so that a stall of this service is not counted against its clients."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol


class TimerHandle(Protocol):
    """A callback that has not run yet."""

    def cancel(self) -> object: ...


class Clock(Protocol):
    """Monotone seconds, and callbacks at a time or a little before. An event loop is one."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None], /) -> TimerHandle: ...


@asynccontextmanager
async def within(clock: Clock, seconds: float) -> AsyncIterator[None]:
    """asyncio.timeout by this clock. Raises TimeoutError."""
    deadline = clock.time() + seconds
    timer: TimerHandle

    def look() -> None:
        nonlocal timer
        if clock.time() >= deadline:
            limit.reschedule(asyncio.get_running_loop().time())
        else:
            timer = clock.call_at(deadline, look)

    async with asyncio.timeout(None) as limit:
        timer = clock.call_at(deadline, look)
        try:
            yield
        finally:
            timer.cancel()
