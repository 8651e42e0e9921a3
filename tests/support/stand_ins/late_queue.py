"""LateQueue: a DeviceQueue that does nothing until the host waits for it, as a device that is behind the host.

So what the host changes too early is seen by the work that still reads it, and what it reads too early is not there. The copies
beside it are a second order: each is done as late as it may be, when something has to come behind it, or as early as it may be.
Code that forgot to put one behind the other gets the wrong bytes in one of the two.
"""

import threading
from collections import deque
from collections.abc import Callable

import torch


class LateQueue:
    """Runs its work in order, in the thread that waits.

    most_waiting: the most of what was submitted that waited at once. num_blocked: waits of the host that had to wait.
    """

    is_immediate = False

    def __init__(self, *, eager_copies: bool = False) -> None:
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()  # and how many copies come before
        self._lock = threading.RLock()  # a device does one thing after the other
        self.num_submitted = self.num_begun = self.most_waiting = self.num_blocked = 0
        self.copies = LateCopies(self, is_eager=eager_copies)

    def submit(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append((work, self.copies.num_leading))
            self.num_submitted += 1
            self.most_waiting = max(self.most_waiting, len(self._waiting))

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(torch.Tensor).clone()

    def mark(self) -> "LateMark":
        return LateMark(self, self.num_submitted, self.copies.num_leading)

    def run_up_to(self, count: int) -> None:
        with self._lock:
            while self.num_begun < count:
                self.num_begun += 1
                work, num_copies = self._waiting.popleft()
                self.copies.run_up_to(num_copies)
                work()

    def wait(self, count: int, num_copies: int) -> None:
        with self._lock:
            self.num_blocked += self.num_begun < count or self.copies.num_begun < num_copies
            self.run_up_to(count)
            self.copies.run_up_to(num_copies)


class LateCopies:
    """A CopyQueue."""

    def __init__(self, queue: LateQueue, *, is_eager: bool) -> None:
        self._queue, self._is_eager = queue, is_eager
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()  # and how much of the queue comes before
        self._num_followed = 0
        self.num_submitted = self.num_begun = self.num_leading = 0

    def submit(self, work: Callable[[], None]) -> None:
        self._waiting.append((work, self._num_followed))
        self.num_submitted += 1
        if self._is_eager:
            self.run_up_to(self.num_submitted)

    def follow(self) -> None:
        self._num_followed = self._queue.num_submitted

    def lead(self) -> None:
        self.num_leading = self.num_submitted

    def run_up_to(self, count: int) -> None:
        while self.num_begun < count:
            self.num_begun += 1
            work, num_before = self._waiting.popleft()
            self._queue.run_up_to(num_before)
            work()


class LateMark:
    def __init__(self, queue: LateQueue, place: int, num_copies: int) -> None:
        self._queue, self._place, self._num_copies = queue, place, num_copies

    def wait(self) -> None:
        self._queue.wait(self._place, self._num_copies)
