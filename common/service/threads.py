"""Work in threads, and how a call is refused where the host gives the process no more of what it needs.

A host has a limit of threads and processes for each user and container, of descriptors for each process, and of memory. To have
reached one is no fault of the service or of the call, and passes. So it is reported as a shortage, and nothing of the call is
left.
"""

import asyncio
import contextvars
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_NO_THREAD = "can't start new thread"  # Python's whole word for it
_BY_ERRNO = {
    errno.EMFILE: "descriptors",
    errno.ENFILE: "descriptors",
    errno.ENOMEM: "memory",
}


@dataclass(frozen=True, slots=True)
class Shortage:
    """What the host gives no more of: threads, processes, descriptors or memory."""

    resource: str

    @property
    def text(self) -> str:
        return f"the host gives the service no more {self.resource} now"


class NoThread(RuntimeError):
    """The host lets this process start no thread. One line."""


def find_shortage(error: BaseException | None) -> Shortage | None:
    """What the host is short of, where that is why this was raised.

    A MemoryError is none: it may come from anywhere, so what is left of the call is not known.
    """
    if isinstance(error, NoThread) or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD):
        return Shortage("threads")
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return Shortage(_BY_ERRNO[error.errno])
    return None


def start_thread(thread: threading.Thread) -> None:
    """Raises NoThread."""
    try:
        thread.start()
    except RuntimeError as error:
        if find_shortage(error) is None:
            raise
        raise NoThread(Shortage("threads").text) from None


class WorkThread:
    """Runs what it is given, in order. An executor's futures and locks would cost each call a tenth of a millisecond."""

    def __init__(self, name: str) -> None:
        """Raises NoThread."""
        self._waiting = SimpleQueue[Callable[[], None] | None]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start_thread(self._thread)

    def submit(self, work: Callable[[], None]) -> None:
        """work: raises nothing."""
        self._waiting.put(work)

    def close(self) -> None:
        """Returns once all that was given is done."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()
            del work  # it may refer to memory that is unmapped between two calls


async def in_thread(function: Callable[..., T], *args: object) -> T:
    """The function's result, from a thread of the loop's executor.

    Raises NoThread; the function is not called then. The executor itself would call it later, once it has a thread again.
    """
    result = Future[T]()
    # Taken from here by the thread, and dropped before the result is known: what the function holds is free then.
    wanted = [partial(contextvars.copy_context().run, function, *args)]
    del function, args

    def work() -> None:
        if not result.set_running_or_notify_cancel():
            return
        do = wanted.pop()
        try:
            found = do()
        except BaseException as error:
            del do
            result.set_exception(error)
        else:
            del do
            result.set_result(found)

    try:
        asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError as error:
        if find_shortage(error) is None:
            raise
        if result.cancel():
            wanted.clear()
            raise NoThread(Shortage("threads").text) from None
        # Another thread has taken it in the meantime.
    return await asyncio.wrap_future(result)


async def in_thread_or_here(function: Callable[..., T], *args: object) -> T:
    """The same of what has to be done: without a thread it is done here, and the loop waits for it."""
    try:
        return await in_thread(function, *args)
    except NoThread:
        return function(*args)
