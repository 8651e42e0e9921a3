"""Cancels a coroutine at one of its awaits: the first at which it has to wait, the second, and so on to its end.

What a coroutine does between two awaits is not interrupted, so these are all places at which a cancellation can hit it. Which
one is hit is said by a number, not by time, so that every place is hit and a failure can be repeated.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class _Counted:
    """Awaits a coroutine, and cancels the task that does so when it waits for the nth time."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], nth: int) -> None:
        self._coroutine, self._nth = coroutine, nth
        self.was_hit = False

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        inner, count, value = self._coroutine.__await__(), 0, None
        failure: BaseException | None = None
        while True:
            try:
                waits_for = inner.send(value) if failure is None else inner.throw(failure)
            except StopIteration as end:
                return end.value
            count, failure = count + 1, None
            if count == self._nth:
                self.was_hit = True
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                value = yield waits_for
            except BaseException as error:
                failure = error


async def cancelled_at(nth: int, coroutine: Coroutine[Any, Any, T]) -> tuple[bool, T | None]:
    """Runs it as a task of its own. Whether there was an nth await, and what it gave where it was not cancelled."""
    counted = _Counted(coroutine, nth)

    async def run() -> T:
        return await counted  # type: ignore[no-any-return]

    try:
        return counted.was_hit, await asyncio.create_task(run())
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        return counted.was_hit, None
