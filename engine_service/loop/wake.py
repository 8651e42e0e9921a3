"""Wake: how other tasks notify the loop, and the task that creates sequences, that there is something new."""

import asyncio


class Wake:
    """Two signals, each cleared by the task that waits for it."""

    def __init__(self) -> None:
        self.loop = asyncio.Event()
        self.creator = asyncio.Event()

    def all(self) -> None:
        """A request came or ended, or the engine is to stop."""
        self.loop.set()
        self.creator.set()


async def wait_for(signal: asyncio.Event, seconds: float | None) -> bool:
    """Wait until the signal is set, for at most so many seconds; None: without a limit. Returns whether it was set."""
    try:
        async with asyncio.timeout(seconds):
            return await signal.wait()
    except TimeoutError:
        return False
