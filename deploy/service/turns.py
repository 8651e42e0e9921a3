"""Turns: places for messages that come, granted to calls in turn of their connections.

Rules: so many places; of one connection a quarter of them; a call beyond those that may wait is refused. A place is kept until
its call ends, or until the call says that its message is counted elsewhere. A service that serves streams beside its calls may
let in only so many calls at a time: however many come at once, its loop then has time for the streams. Knows no wire. All of it
is used on one loop.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from kvkeeper.service.fair_queue import FairQueue

_LONGEST_PAUSE_S = 0.1  # without a turn, while calls wait for what is to allow them
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


class Turns:
    """The places, and the calls that wait for one."""

    def __init__(self, limits: TurnLimits) -> None:
        self._num_at_once = limits.num_at_once
        self._queue = FairQueue[asyncio.Future[None]](
            max_waiting=_NUM_CLIENTS * limits.max_waiting_each,
            max_waiting_each=limits.max_waiting_each,
            max_busy_each=limits.num_each,
        )
        self.num_taken = 0
        self.num_allowed: int | None = None  # calls that may have their turn; None: all
        self._again: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    def allow(self, num_calls: int | None) -> None:
        """Let so many calls have their turn, until this is called again; None: all.

        Where it is not called for a while, calls are let in nevertheless.
        """
        self.num_allowed = num_calls
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if num_calls is not None and self.num_waiting:
            self._again = asyncio.get_running_loop().call_later(_LONGEST_PAUSE_S, self.allow, max(1, num_calls))
        self._proceed()

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
        while self.num_allowed != 0 and self.num_taken < self._num_at_once and (taken := self._queue.take_job()) is not None:
            client, granted = taken
            if granted.cancelled():  # its call has ended, and gives no place back
                self._queue.end_job(client)
                continue
            self.num_taken += 1
            if self.num_allowed is not None:
                self.num_allowed -= 1
            granted.set_result(None)
        if self.num_allowed == 0 and self._again is None and self.num_waiting:
            self._again = asyncio.get_running_loop().call_later(_LONGEST_PAUSE_S, self.allow, 1)

    def _end(self, client: str) -> None:
        self.num_taken -= 1
        self._queue.end_job(client)
        self._proceed()


class Place:
    """The place of one call."""

    def __init__(self, turns: Turns, client: str) -> None:
        self._turns: Turns | None = turns
        self._client = client

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
