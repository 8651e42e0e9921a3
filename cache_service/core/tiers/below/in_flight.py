"""InFlight: the orders between one tier and the host tier that have not ended, and whether another one may begin.

Rules: a tier that fails rests, see breaker.py; while an order is overdue nothing new is asked of the tier, and after a rest one
order at a time.
"""

from collections.abc import Callable, Sequence

from ...values.clock import Clock
from ...values.copies import TierOrder, TierResult
from .breaker import Breaker
from .tier_orders import Load, Question, Store, TierCounts


class InFlight:
    """Of one tier. era: counts how often the tier was cleared."""

    def __init__(self, clock: Clock, era: int) -> None:
        self.era = era
        self.breaker, self.counts = Breaker(), TierCounts()
        self.loads: dict[int, Load] = {}  # by identity, oldest first
        self.stores: dict[int, Store] = {}
        self.questions: dict[int, Question] = {}
        self.wake: Callable[[], None] = lambda: None  # called when there is something to ask, to load or to store
        self._clock = clock

    def may_ask(self, now: float) -> bool:
        return not self.breaker.rests(now) and not self._has_overdue(now)

    def may_begin(self) -> bool:
        """Whether something new may be asked of the tier now."""
        if not self.may_ask(self._clock.now):
            return False
        return not self.breaker.is_on_trial or not (self.loads or self.stores or self.questions)

    def _has_overdue(self, now: float) -> bool:
        """The oldest of each kind ends first."""
        loads, stores, questions = self.loads.values(), self.stores.values(), self.questions.values()
        oldest = next(iter(loads), None), next(iter(stores), None), next(iter(questions), None)
        return any(each is not None and each.deadline <= now for each in oldest)

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
        """An overdue order makes the tier rest. Whether any is in flight, so that this is to be asked again."""
        now = self._clock.now
        if self._has_overdue(now):
            self.breaker.failed(now, is_hang=True)
        return bool(self.loads or self.stores or self.questions)
