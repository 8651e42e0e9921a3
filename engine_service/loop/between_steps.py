"""BetweenSteps: changes that other tasks want made where no step is running. Wake: that there is something new at all.

Owns the changes that wait, and the tasks that are to know once the cache service knows what was computed before them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


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


@dataclass(slots=True, eq=False)
class _Change:
    make: Callable[[], None]
    when: Callable[[], bool]
    is_reported: asyncio.Event = field(default_factory=asyncio.Event)


class BetweenSteps:
    """Changes in the order in which they came, each made once it is due."""

    def __init__(self) -> None:
        self._waiting: list[_Change] = []
        self._unreported: list[asyncio.Event] = []

    def add(self, make: Callable[[], None], when: Callable[[], bool]) -> asyncio.Event:
        """when: whether the change is due. The event is set by note_reported, after the change was made."""
        self._waiting.append(change := _Change(make, when))
        return change.is_reported

    @property
    def is_due(self) -> bool:
        """The loop is to make changes, as soon as no step is running."""
        return any(change.when() for change in self._waiting)

    def make(self) -> None:
        """Make the changes that are due. No step is running, or there is no session."""
        for change in [each for each in self._waiting if each.when()]:
            self._waiting.remove(change)
            change.make()
            self._unreported.append(change.is_reported)

    def note_reported(self) -> None:
        """The cache service knows what was computed before the changes that were made, or there is no session."""
        for event in self._unreported:
            event.set()
        self._unreported.clear()
