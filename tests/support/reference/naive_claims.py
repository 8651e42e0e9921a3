"""What the reference model knows of age: start numbers, claims of refused items, blocks reserved for a claim, pressure.

Rules: written from the protocol. A claim is what a step was refused; the oldest one decides which sequences may start
and take blocks. Everything is worked out anew whenever it is asked for.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from kvkeeper.cache_service.core.values.types import BlockState, PressureLevel
from tests.support.reference.naive_cache import NaiveSequence
from tests.support.reference.naive_keeping import NaiveKeeping

PATIENCE_STEPS, PATIENCE_SECONDS = 4, 10.0
MOST_WAITS = 64
_HYSTERESIS = Fraction("0.05")
_LOW = PressureLevel.LOW


@cache
def exact(ratio: float) -> Fraction:
    """As it is written in decimal. Remembered: a pool's ratios are asked for after every change."""
    return Fraction(str(ratio))


@cache
def _floors(ratios: tuple[float, ...]) -> list[tuple[PressureLevel, Fraction]]:
    return list(zip(list(PressureLevel)[1:], map(exact, ratios), strict=True))


@dataclass
class NaiveClaim:
    num_blocks: int
    step_id: int
    asked_at: float


class NaiveClaims(NaiveKeeping):
    """Adds to the reference model the order of arrivals, its claims and what follows from them."""

    last_number = 0  # drawn for a sequence so far
    num_claims_made = 0
    num_kept = 0  # items that were refused for the sake of an earlier claim
    num_given_back = 0  # answers that asked for blocks back
    num_computing = 0
    num_pressure_changes = 0
    pressure = PressureLevel.LOW

    def age(self, q: NaiveSequence) -> tuple[int, int, int, int]:
        return -q.priority, q.start_number, self.sessions[q.session].number, q.sequence_id

    def claimants(self) -> list[NaiveSequence]:
        """Sequences with a claim, the oldest first."""
        for q in self.sequences.values():
            if q.claim is not None and self.now - q.claim.asked_at >= PATIENCE_SECONDS:
                q.claim = None
        return sorted((q for q in self.sequences.values() if q.claim is not None), key=self.age)

    def num_reserved(self) -> int:
        oldest = self.claimants()[:1]
        return oldest[0].claim.num_blocks if oldest and oldest[0].claim else 0

    def is_later(self, q: NaiveSequence) -> bool:
        oldest = self.claimants()[:1]
        return bool(oldest) and self.age(q) > self.age(oldest[0])

    def kept_from(self, q: NaiveSequence) -> int:
        return self.num_reserved() if self.is_later(q) else 0

    def claim(self, q: NaiveSequence, num_blocks: int) -> None:
        q.claim = NaiveClaim(num_blocks, self.sessions[q.session].step_id, self.now)
        self.num_claims_made += 1

    def end_of_step(self, session: str) -> None:
        step_id = self.sessions[session].step_id
        for q in self.of(session):
            if q.claim is not None and step_id - q.claim.step_id >= PATIENCE_STEPS:
                q.claim = None

    def reclaim_hint(self, session: str) -> int:
        states = self.states()
        coming = sum(states.count(state) for state in (BlockState.FREE, BlockState.CACHED, BlockState.FENCED))
        if not any(q.running and self.is_later(q) for q in self.of(session)):
            return 0
        return max(0, self.num_reserved() - coming)

    def computing(self, q: NaiveSequence, max_hit: int) -> int:
        """Tokens that q could hit, beyond what it can hit now, once another sequence has committed what it was granted."""
        if not self.config.prefix_caching:
            return 0
        size = self.block_size
        most = min(min(max_hit, len(q.tokens) - 1) // size, self.num_shareable(q)) * size
        best = len(self.hit(q, most)) * size
        if best >= most:
            return 0
        if best > q.longest_hit:
            q.longest_hit, q.num_waits = best, 0
        if q.num_waits == MOST_WAITS:
            return 0
        found = 0
        for other in self.sequences.values():
            if other.running and other.scope == q.scope:
                known = other.tokens[: min(self.to_come(other), most, self.num_shareable(other) * size)]
                same = next((i for i, (a, b) in enumerate(zip(known, q.tokens, strict=False)) if a != b), len(known))
                found = max(found, same // size * size)
        if found <= best or found < self.config.min_prefix_tokens:
            return 0
        q.num_waits += 1
        return found

    def to_come(self, q: NaiveSequence) -> int:
        """Tokens of a running sequence that it has yet to publish, as far as the pool can tell, with those before them.

        By the second step after the one that granted them, what a step computes is committed, or it was not computed.
        """
        session, granted = self.sessions[q.session], min(len(q.tokens), q.reserved)
        is_under_way = session.is_one_item or session.step_id < max(q.granted_at) + 2
        if granted > q.committed:
            return granted if is_under_way else 0
        return granted if q in self.pending else 0

    def observe(self) -> None:
        """Pressure after a change: entered at a ratio, left 0.05 below it."""
        size, floors = self.config.num_usable_blocks, _floors(self.config.pressure_levels)
        used = size - self.num_available()
        level = max([_LOW, *(at for at, floor in floors if used * floor.denominator >= floor.numerator * size)])
        if level < self.pressure:
            ratio = Fraction(used, size)
            still = [at for at, floor in floors if at <= self.pressure and 0 < ratio > floor - _HYSTERESIS]
            level = max([level, *still])
        self.num_pressure_changes += level is not self.pressure
        self.pressure = level
