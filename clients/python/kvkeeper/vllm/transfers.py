"""The transfers of one worker: queued by vLLM's thread, run by another, and reported when vLLM asks.

Rules: every load is reported once, its blocks with it where it failed, so that vLLM computes them. An ended request that vLLM
holds is reported once, when none of its stores is left. A request whose blocks vLLM takes back loses the stores that have not
read them, and vLLM waits for those that read just now. Loads go before stores, because a request waits for them.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvkeeper.vllm.orders import Load, Orders
from kvkeeper.vllm.rounds import Job, Rounds

_MOST_STORED_BLOCKS = 512  # of one round, so that a load waits for few


@dataclass(slots=True)
class Finished:
    """What ended since the last time: requests that were loaded, held requests without stores, blocks that hold nothing."""

    loaded: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class Transfers:
    """See above."""

    def __init__(self, rounds: Rounds, renew_s: float) -> None:
        """renew_s: seconds between two renewals of the lease while nothing is moved."""
        self._rounds = rounds
        self._renew_s = renew_s
        self._changed = threading.Condition()
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._running: list[Job] = []
        self._num_stores: Counter[str] = Counter()  # of each request, not ended
        self._held: set[str] = set()
        self._finished = Finished()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvkeeper-transfers", daemon=True)
        self._thread.start()

    def submit(self, orders: Orders, ready: Callable[[], None] | None = None) -> None:
        """Queue the loads and stores of a step. ready: see Job."""
        with self._changed:
            self._loads += (Job(order, ready) for order in orders.loads)
            for order in orders.stores:
                self._stores.append(Job(order, ready))
                self._num_stores[order.request_id] += 1
            self._held.update(orders.held)
            self._changed.notify_all()

    def cancel_stores(self, request_ids: Iterable[str]) -> None:
        """After this returns nothing reads the blocks of these requests any more."""
        wanted = set(request_ids)
        if not wanted:
            return
        with self._changed:
            jobs = [job for job in (*self._stores, *self._running) if job.order.request_id in wanted]
            jobs = [job for job in jobs if not isinstance(job.order, Load)]
            for job in jobs:
                job.is_cancelled = True
            may_be_read = any(job in self._running for job in jobs)
        if may_be_read:
            with self._rounds.copying:  # waits for a copy that runs, which may be one of them
                pass

    def take_finished(self) -> Finished:
        """What ended since the last time; each thing is reported once."""
        with self._changed:
            released = {request_id for request_id in self._held if not self._num_stores[request_id]}
            self._held -= released
            finished, self._finished = self._finished, Finished()
            finished.released = released
            return finished

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or under way. Whether that came about in time."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Finish what is queued, as far as the time allows, and end the session. Idempotent."""
        self.wait(timeout_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _is_idle(self) -> bool:
        return not (self._loads or self._stores or self._running)

    def _run(self) -> None:
        renewed_at = time.monotonic()
        self._rounds.connect()
        while (jobs := self._next_round()) is not None:
            if jobs:
                self._rounds.run(jobs)
                self._note(jobs)
                renewed_at = time.monotonic()
            elif time.monotonic() - renewed_at >= self._renew_s:
                self._rounds.keep_alive()
                renewed_at = time.monotonic()
        self._rounds.close()

    def _next_round(self) -> list[Job] | None:
        """All loads and some stores; none of them when it is time to renew; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._loads or self._stores, self._renew_s)
            if self._is_closing:
                return None
            jobs, num_blocks = list(self._loads), 0
            self._loads.clear()
            while self._stores and num_blocks < _MOST_STORED_BLOCKS:
                job = self._stores.popleft()
                num_blocks += len(job.order.block_ids)
                jobs.append(job)
            self._running = jobs
            return jobs

    def _note(self, jobs: list[Job]) -> None:
        with self._changed:
            self._running = []
            for job in jobs:
                order = job.order
                if isinstance(order, Load):
                    self._finished.loaded.add(order.request_id)
                    self._finished.failed_blocks.update(order.block_ids[job.num_blocks :])
                else:
                    self._num_stores[order.request_id] -= 1
                    if not self._num_stores[order.request_id]:
                        del self._num_stores[order.request_id]
            self._changed.notify_all()
