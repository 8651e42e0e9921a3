"""OpenStreams: how many streams have not been answered to their end, so that an engine that stops can wait for them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class OpenStreams:
    """How many streams have not been answered to their end."""

    def __init__(self) -> None:
        self.num_open = 0
        self._has_none = asyncio.Event()
        self._has_none.set()

    async def wait_none(self) -> None:
        """Until each stream has been answered to its end."""
        await self._has_none.wait()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a stream that has not been answered to its end."""
        self.num_open += 1
        self._has_none.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._has_none.set()
