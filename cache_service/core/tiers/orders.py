"""What a tier asked by name is ordered to do, how it is used, and which of its orders have not ended.

Rules: a tier that fails rests, see Breaker; while an order is overdue nothing new is asked of the tier, and after a rest one
order at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..values.clock import Clock
from ..values.copies import TierOrder, TierResult
from ..values.types import Int32Array

_MOST_FAILURES = 3  # in a row
_FIRST_REST, _LONGEST_REST = 1.0, 60.0  # seconds


class TierRules(NamedTuple):
    """How a tier is used. on_second_use: only blocks that were loaded back from the host tier are stored.

    weighs: loads that take longer than computing are not ordered, see worth.py. tenants: whose blocks are stored, if not all.
    """

    on_second_use: bool = False
    deadline: float = 2.0  # seconds that a sequence waits for its load
    most_loading: int = 4096  # blocks in flight towards the host tier
    most_asked: int = 0  # blocks of a prompt that a question is about; 0 where the directory knows what is stored
    name: str = "disk"  # in the names of counts
    weighs: bool = False
    tenants: frozenset[str] | None = None


@dataclass(slots=True, eq=False)
class Question:
    """Which of these names are stored: so many of the first as all are.

    slot: of the sequence that waits, or -1. tokens: of its prompt up to the end of the last name. num_full: of the first names,
    each of which is of no use without those before it. asked: the names of which it is known whether they are stored, after
    num_turns questions.
    """

    slot: int
    root: int
    tokens: Int32Array
    first: int
    names: list[bytes]
    num_full: int
    era: int
    asked_at: float
    deadline: float
    is_trial: bool = False  # what is found is loaded even if that does not pay
    is_in_flight: bool = True
    is_cancelled: bool = False  # too late to be worth an answer
    asked: frozenset[bytes] = frozenset()
    num_turns: int = 1


@dataclass(slots=True, eq=False)
class Load:
    """A part of a prompt on its way to the host tier.

    tokens: of the prompt up to the end of the load. held: host blocks of the blocks before it. wanted_at: since when a sequence
    has waited for it. num_entries: of a table, that it makes a hit longer.
    """

    root: int
    tokens: Int32Array
    orders: list[TierOrder]
    held: Int32Array
    wanted_at: float
    deadline: float
    num_entries: int
    is_in_flight: bool = True


@dataclass(slots=True, eq=False)
class Store:
    """Blocks on their way from the host tier."""

    orders: list[TierOrder]
    deadline: float


@dataclass(slots=True)
class TierCounts:
    """Sums over the life of the tier, in blocks but for loads."""

    num_loads: int = 0
    num_late_loads: int = 0
    num_hit_blocks: int = 0
    num_stored_blocks: int = 0
    num_damaged_blocks: int = 0
    num_failed_blocks: int = 0


class Breaker:
    """Whether a tier that fails or hangs is asked at all. Times are seconds of the pool's clock.

    Some failures in a row make it rest, an overdue order does so at once; while an order is overdue nothing new is asked of it;
    after the rest one order is tried, and the next rest is twice as long if that fails too. One success ends all that.
    """

    def __init__(self) -> None:
        self.num_rests = 0
        self._num_failures = 0  # in a row
        self._rest = _FIRST_REST
        self._until = float("-inf")

    def rests(self, now: float) -> bool:
        """Whether nothing is to be asked of it now."""
        return now < self._until

    def seconds_left(self, now: float) -> float:
        """Until the tier is asked again."""
        return max(self._until - now, 0.0)

    @property
    def is_on_trial(self) -> bool:
        """Whether it has rested and not succeeded since: one order at a time is enough."""
        return self._num_failures >= _MOST_FAILURES

    def succeeded(self) -> None:
        """An order was run, in time."""
        self._num_failures, self._rest = 0, _FIRST_REST

    def failed(self, now: float, *, is_hang: bool = False) -> None:
        """An order was refused, or is overdue."""
        self._num_failures = _MOST_FAILURES if is_hang else self._num_failures + 1
        if self._num_failures >= _MOST_FAILURES and not self.rests(now):
            self.num_rests += 1
            self._until = now + self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)


class InFlight:
    """The orders between one tier and the host tier that have not ended, and whether another one may begin.

    era: counts how often the tier was cleared.
    """

    def __init__(self, clock: Clock, era: int) -> None:
        self.era = era
        self.breaker, self.counts = Breaker(), TierCounts()
        self.loads: dict[int, Load] = {}  # by identity, oldest first
        self.stores: dict[int, Store] = {}
        self.questions: dict[int, Question] = {}
        self.wake: Callable[[], None] = lambda: None  # called when there is something to ask, to load or to store
        self._clock = clock

    def __bool__(self) -> bool:
        """Whether any has not ended."""
        return bool(self.loads or self.stores or self.questions)

    def may_ask(self, now: float) -> bool:
        return not self.breaker.rests(now) and not self._has_overdue(now)

    def may_begin(self) -> bool:
        """Whether something new may be asked of the tier now."""
        if not self.may_ask(self._clock.now):
            return False
        return not self.breaker.is_on_trial or not self

    def _has_overdue(self, now: float) -> bool:
        """The oldest of each kind ends first."""
        loads, stores, questions = self.loads.values(), self.stores.values(), self.questions.values()
        oldest = next(iter(loads), None), next(iter(stores), None), next(iter(questions), None)
        return any(each is not None and each.deadline <= now for each in oldest)

    def roots(self) -> list[int]:
        """The roots that loads and questions are for."""
        return [load.root for load in self.loads.values()] + [question.root for question in self.questions.values()]

    def end(self, which: Load | Store | Question, among: dict[int, Load] | dict[int, Store] | dict[int, Question]) -> None:
        now = self._clock.now
        if which.deadline <= now:
            self.breaker.failed(now, is_hang=True)
        del among[id(which)]

    def count(self, results: Sequence[TierResult]) -> None:
        num_failed = results.count(TierResult.FAILED)
        self.counts.num_failed_blocks += num_failed
        self.counts.num_damaged_blocks += results.count(TierResult.DAMAGED)
        if num_failed:
            self.breaker.failed(self._clock.now)
        elif any(result in (TierResult.DONE, TierResult.DAMAGED, TierResult.MISSING) for result in results):
            self.breaker.succeeded()

    def is_stale(self, order: TierOrder) -> bool:
        """Whether the tier was cleared since the order was made."""
        return order.era != self.era

    def tend(self) -> bool:
        """An overdue order makes the tier rest. Whether any is in flight, so that this is to be called again."""
        now = self._clock.now
        if self._has_overdue(now):
            self.breaker.failed(now, is_hang=True)
        return bool(self)
