"""PoolTier: a tier below the host tier of one running pool: what the core has ordered is run by threads, and reported back.

Owns when the core is asked for orders, how they are divided among the threads, and what is measured of them. Nothing here waits
for a disk or a server: the loop hands work over and is notified of its end. What a load's deadline has overtaken before a
thread began with it is not begun. At its end the pool waits for the threads only for a moment, because a disk may never let go
of one; the memory that such a thread writes into stays mapped as long as it does.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Protocol

import structlog

from ..core.manager import PoolManager
from ..core.tiers.content_tier import ContentTier
from ..core.tiers.orders import Load, Question, Store
from ..core.values.copies import TierOrder, TierResult
from ..memory.arena import ByteArray
from ..memory.disk.disk_threads import NUM_THREADS, DiskThreads

log = structlog.get_logger()

_PUMP_AFTER = 0.002  # seconds; what one report of an engine frees is stored together
_TEND_EVERY = 0.1  # seconds, while something is in flight
_PART_BYTES = 4 << 20  # of a thread's turn
_STORES_AT_ONCE = NUM_THREADS  # turns that are given before one of them has ended
_CLOSE_SECONDS = 5.0
_MEASURED_SECONDS = 4.0  # of work, after which what was measured counts half

Io = Callable[[Sequence[TierOrder], ByteArray], list[TierResult]]


@dataclass(slots=True)
class Rate:
    """Bytes a second while at least one order was running."""

    num_bytes: float = 0.0
    seconds: float = 0.0
    num_running: int = 0
    since: float = 0.0

    @property
    def bytes_per_second(self) -> int:
        return int(self.num_bytes / self.seconds) if self.seconds else 0

    def begin(self, now: float) -> None:
        if not self.num_running:
            self.since = now
        self.num_running += 1

    def end(self, now: float, num_bytes: int) -> None:
        self.num_running -= 1
        self.num_bytes += num_bytes
        self.seconds += now - self.since
        self.since = now
        if self.seconds > _MEASURED_SECONDS:
            self.num_bytes, self.seconds = self.num_bytes / 2, self.seconds / 2


@dataclass(slots=True, eq=False)
class _Job:
    """A load or a store, in parts; results by part."""

    what: Load | Store
    parts: list[list[TierOrder]]
    results: list[list[TierResult]] = field(default_factory=list)
    num_left: int = 0
    is_cancelled: bool = False


class Place(Protocol):
    """Where the blocks of a tier are. Its methods are called in threads, but for begin_clearing, which waits for nothing."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...

    @property
    def facts(self) -> dict[str, object]:
        """For the log."""

    def begin_clearing(self) -> None:
        """Nothing that was stored before may be found."""

    def write_era(self, era: int) -> bool:
        """Whether a later run will know, too."""

    def ask(self, names: Sequence[bytes]) -> int | None:
        """How many of the first names are there; None where there is no answer."""

    def read(self, orders: Sequence[TierOrder], hosts: ByteArray) -> list[TierResult]: ...

    def write(self, orders: Sequence[TierOrder], hosts: ByteArray) -> list[TierResult]: ...

    def close(self) -> None: ...


class PoolTier:
    """Runs the orders of one tier of one pool."""

    def __init__(
        self,
        manager: PoolManager,
        tier: ContentTier,
        place: Place,
        hosts: ByteArray,
        now: Callable[[], float],
        give_back: Callable[[], None],
    ) -> None:
        """hosts: [num_host_blocks, block_bytes]. give_back: called in any thread
        at the end, once no thread is at the place.
        """
        self.reads, self.writes = Rate(), Rate()
        self.place = place
        self._manager, self._tier, self._hosts, self._now, self._give_back = manager, tier, hosts, now, give_back
        self._loop = asyncio.get_running_loop()
        self._threads = DiskThreads()
        self._jobs: dict[int, _Job] = {}
        self._era = self._cleared_era = tier.flight.era
        self._name = tier.rules.name
        self._pumping: asyncio.TimerHandle | None = None
        self._tending: asyncio.TimerHandle | None = None
        self._num_rests = 0
        self._is_closed = False
        self._settled = asyncio.Event()  # the place knows the present era
        self._settled.set()
        tier.flight.wake = self._wake
        log.info(f"{self._name}_opened", num_blocks=len(tier.directory.names()), **place.facts)

    async def cleared(self, seconds: float) -> None:
        """Returns once a later run will know, too, that the pool was cleared; or after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._settled.wait()
        except TimeoutError:
            log.warning(f"{self._name}_clear_unsure", seconds=seconds)

    def stop(self) -> None:
        """Nothing is begun any more, and what is queued is dropped."""
        self._is_closed = True
        self._tier.flight.wake = lambda: None
        for timer in (self._pumping, self._tending):
            if timer is not None:
                timer.cancel()
        for job in self._jobs.values():
            job.is_cancelled = True

    def close(self) -> None:
        """Closes a stopped tier, in any thread: waits for what a thread is doing, but not for long."""
        if not self._threads.close(_CLOSE_SECONDS, self._close_place):
            log.warning(f"{self._name}_hangs", num_orders=len(self._jobs))

    def _close_place(self) -> None:
        try:
            self.place.close()
        finally:
            self._give_back()

    def _wake(self) -> None:
        if self._cleared_era != self._tier.flight.era:
            self._cleared_era = self._tier.flight.era
            self._settled.clear()
            self.place.begin_clearing()
        if self._pumping is None and not self._is_closed:
            self._pumping = self._loop.call_later(_PUMP_AFTER, self._pump)

    def _pump(self) -> None:
        """Takes what the core has to order, as much as the threads should have at once."""
        self._pumping = None
        if self._is_closed:
            return
        manager = self._manager
        manager.state.tick(self._now())
        tier, part = self._tier, max(_PART_BYTES // self.place.slot_bytes, 1)
        if tier.flight.era != self._era:
            self._era = tier.flight.era
            self._threads.do(partial(self._write_era, self._era))
        for question in tier.questions.take():
            self._threads.do(partial(self._ask, question))
        for load in tier.loads.take():
            size = min(part, max(-(-len(load.orders) // NUM_THREADS), 1))
            self._begin(load, size, self.place.read, self.reads)
        while len(tier.flight.stores) < _STORES_AT_ONCE and (store := tier.stores.prepare(part)) is not None:
            self._begin(store, part, self.place.write, self.writes)
        if tier.flight and self._tending is None:
            self._tending = self._loop.call_later(_TEND_EVERY, self._tend)

    def _begin(self, what: Load | Store, part: int, io: Io, rate: Rate) -> None:
        parts = [what.orders[first : first + part] for first in range(0, len(what.orders), part)]
        job = self._jobs[id(what)] = _Job(what, parts, [[] for _ in parts], len(parts))
        for at, orders in enumerate(parts):
            rate.begin(perf_counter())
            self._threads.do(partial(self._run, job, at, orders, io, rate))

    def _run(self, job: _Job, at: int, orders: list[TierOrder], io: Io, rate: Rate) -> None:
        """In a thread."""
        if job.is_cancelled:
            results = [TierResult.CANCELLED] * len(orders)
        else:
            try:
                results = io(orders, self._hosts)
            except Exception:  # a thread that ends would leave its work undone
                log.exception("tier_order_failed", tier=self._name)
                results = [TierResult.FAILED] * len(orders)
        self._post(partial(self._end_part, job, at, results, rate))

    def _end_part(self, job: _Job, at: int, results: list[TierResult], rate: Rate) -> None:
        rate.end(perf_counter(), results.count(TierResult.DONE) * self.place.block_bytes)
        job.results[at] = results
        job.num_left -= 1
        if job.num_left or self._is_closed:
            return
        del self._jobs[id(job.what)]
        manager = self._manager
        manager.state.tick(self._now())
        all_results = [result for part in job.results for result in part]
        if isinstance(job.what, Load):
            self._tier.loads.complete(job.what, all_results)
        else:
            self._tier.stores.complete(job.what, all_results)
        num_damaged, num_failed = (all_results.count(result) for result in (TierResult.DAMAGED, TierResult.FAILED))
        if num_damaged or num_failed:
            kind = "load" if isinstance(job.what, Load) else "store"
            log.warning(f"{self._name}_blocks_lost", kind=kind, num_damaged=num_damaged, num_failed=num_failed)
        self._report_rests()
        self._wake()

    def _tend(self) -> None:
        self._tending = None
        self._threads.fill()
        manager = self._manager
        now = self._now()
        manager.state.tick(now)
        for job in self._jobs.values():
            job.is_cancelled |= job.what.deadline <= now
        for question in self._tier.flight.questions.values():
            question.is_cancelled |= question.deadline <= now
        if self._tier.flight.tend():
            self._tending = self._loop.call_later(_TEND_EVERY, self._tend)
        self._report_rests()

    def _report_rests(self) -> None:
        num_rests = self._tier.flight.breaker.num_rests
        if num_rests > self._num_rests:
            self._num_rests = num_rests
            log.warning(f"{self._name}_rests", seconds=round(self._tier.flight.breaker.seconds_left(self._now()), 1))

    def _write_era(self, era: int) -> None:
        """In a thread."""
        try:
            is_written = self.place.write_era(era)
        except Exception:
            log.exception("tier_clear_failed", tier=self._name)
            is_written = False
        if is_written:
            self._post(partial(self._end_clearing, era))
        else:
            log.warning(f"{self._name}_clear_failed")

    def _end_clearing(self, era: int) -> None:
        if era == self._tier.flight.era:
            self._settled.set()

    def _ask(self, question: Question) -> None:
        """In a thread."""
        num_stored = None
        if not question.is_cancelled:
            try:
                num_stored = self.place.ask(question.names)
            except Exception:
                log.exception("tier_question_failed", tier=self._name)
        self._post(partial(self._end_question, question, num_stored))

    def _end_question(self, question: Question, num_stored: int | None) -> None:
        if self._is_closed:
            return
        manager = self._manager
        manager.state.tick(self._now())
        self._tier.complete_question(question, num_stored)
        self._report_rests()
        self._wake()

    def _post(self, done: Callable[[], None]) -> None:
        """From a thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(done)
