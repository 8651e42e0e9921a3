"""StreamPace: when the streams of clients are written, so that writing leaves the loop time for steps.

Each write of a stream costs more than the token in it. Streams are written together, in rounds: what comes until the next round
is written as one message. Where steps are slower than rounds may be, each token is written at once. OpenStreams counts streams,
so that an engine that stops can wait for them.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A write costs about a tenth of a millisecond of the loop's thread (256 streams, two slow cores). Rounds take half of its time
# at most, so many streams are written less often than the interval allows.
_SECONDS_A_WRITE = 2e-4


class StreamPace:
    """Lets streams be written in rounds, not more often than every interval_s seconds; 0: whenever there is something."""

    def __init__(self, interval_s: float, loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.get_running_loop) -> None:
        """loop: its clock and timers count."""
        self._interval_s = interval_s
        self._loop = loop
        self._due: list[Callable[[], None]] = []
        self._next_at = 0.0  # of the loop's clock
        self._round: asyncio.Handle | None = None

    @property
    def merges(self) -> bool:
        """Whether what comes until the next round is one message. Else each token is one."""
        return self._interval_s > 0

    def call_soon(self, write: Callable[[], None]) -> None:
        """Call it with the next round."""
        if not self._interval_s:
            write()
            return
        self._due.append(write)
        if self._round is None:
            loop = self._loop()
            self._round = loop.call_at(max(self._next_at, loop.time()), self._run_round)

    def _run_round(self) -> None:
        self._round = None
        due, self._due = self._due, []
        for write in due:
            write()
        spent = _SECONDS_A_WRITE * len(due)
        self._next_at = self._loop().time() + max(self._interval_s, spent)


class HasUnread:
    """Whether there is something to write on one stream. The first of it is reported at once."""

    def __init__(self, pace: StreamPace) -> None:
        self._pace = pace
        self._event = asyncio.Event()
        self._has_begun = self._is_due = self._has_round = False

    def notify(self, *, at_once: bool) -> None:
        """There is more. at_once: it does not wait for a round."""
        if at_once or not self._has_begun:
            self._has_begun = True
            self._event.set()
        elif not self._is_due:
            self._is_due = True
            self._pace.call_soon(self._note_round)

    def _note_round(self) -> None:
        self._has_round = True
        self._event.set()

    async def wait(self) -> bool:
        """Wait until something is to be written. Returns whether what waited for a round is, too; else it still waits."""
        await self._event.wait()
        self._event.clear()
        has_round, self._has_round = self._has_round, False
        if has_round:
            self._is_due = False
        return has_round


class OpenStreams:
    """How many streams have not been written to their end."""

    def __init__(self) -> None:
        self.num_open = 0
        self._has_none = asyncio.Event()
        self._has_none.set()

    async def wait_none(self) -> None:
        """Wait until each stream has been written to its end."""
        await self._has_none.wait()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a stream until it has been written to its end."""
        self.num_open += 1
        self._has_none.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._has_none.set()
