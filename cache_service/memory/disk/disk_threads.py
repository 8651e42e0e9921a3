"""DiskThreads: the few threads that wait for a disk, so that nothing else does.

Rules: work begins in the order in which it is given; a thread that a disk never lets go ends with the process and holds up
neither its end nor other pools, each of which has threads of its own. Where the host has no thread left, work waits as it does
for a disk that is slow: for those threads that there are, or until `fill` finds one.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvkeeper.common.service.threads import NoThread, start_thread

NUM_THREADS = 4  # keep a disk busy while one of them makes a digest


class DiskThreads:
    """The threads of one pool. They start with the first work."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._at_end: Callable[[], None] = lambda: None
        self._num_running = 0
        self._lock = threading.Lock()

    def do(self, work: Callable[[], None]) -> None:
        """work() is called in one of the threads. It raises nothing."""
        self._work.put(work)
        self.fill()

    def fill(self) -> None:
        """Starts the threads that are missing, as far as the host gives them."""
        while len(self._threads) < NUM_THREADS:
            thread = threading.Thread(target=self._run, name="kvkeeper-disk", daemon=True)
            try:
                start_thread(thread)
            except NoThread:
                return
            self._threads.append(thread)

    def close(self, seconds: float, at_end: Callable[[], None]) -> bool:
        """Ends the threads after the work given so far. Whether all have ended within so many seconds, in all.

        at_end: called in the last of them, however late that ends; here, if none has begun.
        """
        self._at_end = at_end
        self._num_running = len(self._threads)
        if not self._threads:
            at_end()
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(seconds)
            seconds = 0.0 if thread.is_alive() else seconds
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
        with self._lock:
            self._num_running -= 1
            is_last = not self._num_running
        if is_last:
            self._at_end()
