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
    """Until the signal is set, but no longer than so many seconds; None: however long that takes. Whether it was set."""
    try:
        async with asyncio.timeout(seconds):
            return await signal.wait()
    except TimeoutError:
        return False
