"""Turns: places for messages that come, granted to calls in turn of their connections.

Rules: so many places; of one connection a quarter of them; a call beyond those that may wait is refused. A place is kept until
its call ends, or until the call says that its message is counted elsewhere. A service that serves streams beside its calls may
let calls in for a share of the time only, by windows: however many calls come at once, its loop then has time for the streams.
The time is what is bounded, not the number of calls, so that short steps and long ones, cheap calls and costly ones leave the
same share. Knows no wire. All of it is used on one loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from kvkeeper.common.service.fair_queue import FairQueue

_LONGEST_PERIOD_S = 0.1  # from one window to the next, while calls wait
_NUM_CLIENTS = 16  # connections whose calls may all wait before those of others are refused too


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Limits of calls whose messages come or are to come."""

    num_at_once: int  # messages
    max_waiting_each: int  # calls of one connection that wait for their turn

    @property
    def num_each(self) -> int:
        """Messages of one connection that come at once."""
        return max(1, self.num_at_once // 4)


class CallPlace(Protocol):
    """The place of one call."""

    def leave(self) -> None:
        """Give the place back. Idempotent."""


class TurnSource(Protocol):
    """Grants places to calls: Turns, or one that asks the Turns of another process."""

    def turn(self, client: str) -> AbstractAsyncContextManager[CallPlace]:
        """A place for one message. Raises TooManyWaiting."""


class Turns:
    """The places, and the calls that wait for one."""

    def __init__(self, limits: TurnLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._num_at_once = limits.num_at_once
        self._queue = FairQueue[asyncio.Future[None]](
            max_waiting=_NUM_CLIENTS * limits.max_waiting_each,
            max_waiting_each=limits.max_waiting_each,
            max_busy_each=limits.num_each,
        )
        self.num_taken = 0
        self._clock = clock
        self._share = 1.0  # of the time, in which calls are let in
        self._opened = self._closes = clock()  # the window, where the share is less than all
        self._is_unused = False  # whether the window has let no call in yet
        self._next: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def is_always_open(self) -> bool:
        return self._share >= 1

    def open_window(self, share: float) -> None:
        """Let calls in for a share of the time since the last window opened, and one at least. 1: until this is called again.

        A service calls this at each of its steps. Where it does not for a while, as in a long step, windows open nevertheless.
        """
        if self._next is not None:
            self._next.cancel()
            self._next = None
        now = self._clock()
        self._closes = now + share * min(now - self._opened, _LONGEST_PERIOD_S)
        self._opened, self._share, self._is_unused = now, share, True
        self._proceed()

    def _is_open(self) -> bool:
        return self.is_always_open or self._is_unused or self._clock() < self._closes

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator["Place"]:
        """A place for one message. Raises TooManyWaiting."""
        granted = asyncio.get_running_loop().create_future()
        self._queue.put(client, granted)
        self._proceed()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._queue.remove(client, granted)
            else:
                self._end(client)
            raise
        place = Place(self, client)
        _place.set(place)
        try:
            yield place
        finally:
            place.leave()

    def _proceed(self) -> None:
        while self.num_taken < self._num_at_once and self._is_open() and (taken := self._queue.take_job()) is not None:
            client, granted = taken
            if granted.cancelled():  # its call has ended, and gives no place back
                self._queue.end_job(client)
                continue
            self.num_taken += 1
            self._is_unused = False
            granted.set_result(None)
        if self.num_waiting and not self.is_always_open and self._next is None:
            delay = max(0.0, self._opened + _LONGEST_PERIOD_S - self._clock())
            self._next = asyncio.get_running_loop().call_later(delay, self.open_window, self._share)

    def _end(self, client: str) -> None:
        self.num_taken -= 1
        self._queue.end_job(client)
        self._proceed()


class Place:
    """The place of one call."""

    def __init__(self, turns: Turns, client: str) -> None:
        self._turns: Turns | None = turns
        self._client = client

    @property
    def is_left(self) -> bool:
        return self._turns is None

    def leave(self) -> None:
        """Give the place back. Idempotent."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns._end(self._client)


_place: ContextVar[Place | None] = ContextVar("place", default=None)


def leave_place() -> None:
    """The message of the call that runs is counted elsewhere: give its place back, if it still has one."""
    if (place := _place.get()) is not None:
        place.leave()


def has_left_place() -> bool:
    """Whether the call that runs has given its place back, so that further messages may come beside its own."""
    place = _place.get()
    return place is not None and place.is_left
