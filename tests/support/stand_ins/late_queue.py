"""LateQueue: a DeviceQueue that does nothing until somebody waits for it, as a device that is behind the host.

So what the host changes too early is seen by the work that still reads it, and what it reads too early is not there.
"""

import threading
from collections import deque
from collections.abc import Callable

import torch


class LateQueue:
    """Runs its work in order, in the thread that waits. most_waiting: the most of what was submitted that waited at once."""

    is_immediate = False

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()  # a device does one thing after the other
        self.num_submitted = self.num_begun = self.most_waiting = 0

    def submit(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append(work)
            self.num_submitted += 1
            self.most_waiting = max(self.most_waiting, len(self._waiting))

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(torch.Tensor).clone()

    def mark(self) -> "LateMark":
        return LateMark(self, self.num_submitted)

    def run_up_to(self, count: int) -> None:
        with self._lock:
            while self.num_begun < count:
                self.num_begun += 1
                self._waiting.popleft()()


class LateMark:
    def __init__(self, queue: LateQueue, place: int) -> None:
        self._queue, self._place = queue, place

    def wait(self) -> None:
        self._queue.run_up_to(self._place)
