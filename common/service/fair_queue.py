"""FairQueue: jobs of many clients, taken in turn, so that the many jobs of one client do not keep out the one of another.

Rules: a client's own jobs come in order; clients with waiting jobs take turns; a client with as many jobs under way as one
client may have is passed over; a job that would wait beyond the bounds is refused at once. Pure.
"""

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TooManyWaiting(Exception):
    """As many jobs wait as may, of one client or of all."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} are waiting, the most that may")
        self.limit = limit


class FairQueue(Generic[T]):
    """Jobs that wait, by client, and how many of each client are under way."""

    def __init__(self, *, max_waiting: int, max_waiting_each: int, max_busy_each: int) -> None:
        """max_waiting_each, max_busy_each: of one client; max_waiting: of all together."""
        self._max_waiting, self._max_waiting_each, self._max_busy_each = max_waiting, max_waiting_each, max_busy_each
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # the next client comes first; none is empty
        self._busy: Counter[str] = Counter()  # jobs under way; none is zero
        self.num_waiting = 0

    def put(self, client: str, job: T) -> None:
        """Add a job. Raises TooManyWaiting."""
        own = len(self._waiting.get(client, ()))
        for count, limit in ((own, self._max_waiting_each), (self.num_waiting, self._max_waiting)):
            if count >= limit:
                raise TooManyWaiting(limit)
        self._waiting.setdefault(client, deque()).append(job)
        self.num_waiting += 1

    def take_job(self) -> tuple[str, T] | None:
        """The next job and its client; the job is under way from now on. None: no job may start."""
        client = next((name for name in self._waiting if self._busy.get(name, 0) < self._max_busy_each), None)
        if client is None:
            return None
        job = self._waiting[client].popleft()
        self.num_waiting -= 1
        self._waiting.move_to_end(client)
        self._drop_empty(client)
        self._busy[client] += 1
        return client, job

    def end_job(self, client: str) -> None:
        """One of the client's jobs under way has ended."""
        self._busy[client] -= 1
        if not self._busy[client]:
            del self._busy[client]

    def remove(self, client: str, job: T) -> None:
        """The job is not wanted any more. Nothing happens if it does not wait."""
        jobs = self._waiting.get(client)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            self.num_waiting -= 1
            self._drop_empty(client)

    def _drop_empty(self, client: str) -> None:
        if not self._waiting[client]:
            del self._waiting[client]
