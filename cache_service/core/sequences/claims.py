"""Claims: which sequences wait for blocks, and for which one free blocks are reserved, so that running sequences finish.

Owns the claims of one pool: starts and reservations that steps were refused, and the one total order that decides between
them: higher priority first, then the earlier arrival. Blocks are reserved for the oldest claim: no later arrival starts, no
reservation of a later one takes them, and sessions that run later ones get a hint how many blocks to give back. Reservations
claim as starts do: when the last sequences of two engines both want one more block, neither engine asks for a start.

A claim is forgotten when it is granted, when its sequence or session ends, and when it was not asked for again: by the
session's next PATIENCE_STEPS steps, or for PATIENCE_SECONDS. So a client that gave up does not block the pool.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..blocks.block_pool import BlockPool
from ..values.clock import Clock
from ..values.types import Int64Array, SequenceState
from .sequence_table import SequenceTable
from .session_state import SessionState

PATIENCE_STEPS = 4
PATIENCE_SECONDS = 10.0

Age = tuple[int, int, int, int]  # -priority, start number, number of the session, sequence id: the smaller goes first


class StartNumbers:
    """Places in the order of arrivals, drawn service-wide: all pools of a service share one of these."""

    def __init__(self) -> None:
        self.last = 0

    def draw(self) -> int:
        self.last += 1
        return self.last


@dataclass(slots=True)
class Claim:
    """A refused request: so many blocks, the watermark included, asked for in that step at that time."""

    age: Age
    owner_number: int
    num_blocks: int
    step_id: int
    asked_at: float


class Claims:
    """The claims of one pool, by slot. `claims` is empty while blocks are enough, which is all that a step has to look at."""

    def __init__(self, sequences: SequenceTable, pool: BlockPool, clock: Clock) -> None:
        self.claims: dict[int, Claim] = {}
        self._clock = clock
        self._sequences = sequences
        self._pool = pool
        self._oldest: Claim | None = None  # of the claims

    @property
    def num_reserved(self) -> int:
        """Blocks reserved for the oldest claim; 0 without one."""
        return self._oldest.num_blocks if self._oldest is not None else 0

    @property
    def most_reserved(self) -> int:
        """Blocks that the largest claim waits for."""
        return max((claim.num_blocks for claim in self.claims.values()), default=0)

    # Asked

    def are_later(self, slots: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these sequences come after the oldest claim [n]."""
        if self._oldest is None:
            return np.zeros(len(slots), np.bool_)
        seqs = self._sequences
        later = np.zeros(len(slots), np.bool_)
        columns = (-seqs.priorities[slots], seqs.start_numbers[slots], seqs.owners[slots], seqs.ids[slots])
        for column, value in zip(reversed(columns), reversed(self._oldest.age), strict=True):
            later = (column > value) | ((column == value) & later)
        return later

    def is_later(self, slot: int) -> bool:
        """Whether the sequence comes after the oldest claim: it may neither start nor take what is reserved."""
        return self._oldest is not None and self.age(slot) > self._oldest.age

    def would_be_later(self, priority: int) -> bool:
        """The same of a sequence that is yet to be created."""
        return self._oldest is not None and -priority >= self._oldest.age[0]

    def num_kept_from(self, slot: int) -> int:
        """Available blocks that this sequence may not have, because they are reserved for an earlier arrival."""
        return self.num_reserved if self.is_later(slot) else 0

    def reclaim_hint(self, owner: SessionState) -> int:
        """Blocks that the oldest claim still misses, for a session that runs later arrivals; those that are coming count."""
        missing = self.num_reserved - self._pool.num_available - self._pool.num_fenced
        if missing <= 0:
            return 0
        seqs = self._sequences
        running = np.flatnonzero((seqs.owners == owner.number) & (seqs.states == SequenceState.RUNNING))
        return missing if self.are_later(running).any() else 0

    def age(self, slot: int) -> Age:
        seqs = self._sequences
        return -int(seqs.priorities[slot]), int(seqs.start_numbers[slot]), int(seqs.owners[slot]), int(seqs.ids[slot])

    # Noted

    def add_claim(self, owner: SessionState, slot: int, num_blocks: int) -> None:
        """A step of the session was refused so many blocks for this sequence."""
        assert num_blocks > 0, "what needs no block is not refused"
        self.forget_claim(slot)
        claim = self.claims[slot] = Claim(self.age(slot), owner.number, num_blocks, owner.step_id, self._clock.now)
        if self._oldest is None or claim.age < self._oldest.age:
            self._oldest = claim

    def forget_claim(self, slot: int) -> None:
        """The sequence got what it asked for, or asks no more."""
        claim = self.claims.pop(slot, None)
        if claim is not None and claim is self._oldest:
            self._oldest = min(self.claims.values(), key=lambda other: other.age, default=None)

    def forget_claims(self, slots: Int64Array) -> None:
        for slot in self.claims.keys() & set(slots.tolist()):
            self.forget_claim(slot)

    def change_age(self, slot: int) -> None:
        """The sequence has another priority now."""
        if slot in self.claims:
            self.claims[slot].age = self.age(slot)
            self._oldest = min(self.claims.values(), key=lambda other: other.age)

    def forget_stale(self) -> None:
        """Forgets the claims that were last asked for too long ago."""
        now = self._clock.now
        for slot in [slot for slot, claim in self.claims.items() if now - claim.asked_at >= PATIENCE_SECONDS]:
            self.forget_claim(slot)

    def forget_unrepeated(self, owner: SessionState) -> None:
        """A step of the session has its reply: forgets the claims that its last steps did not ask for again."""
        for slot, claim in list(self.claims.items()):
            if claim.owner_number == owner.number and owner.step_id - claim.step_id >= PATIENCE_STEPS:
                self.forget_claim(slot)

    def check(self) -> list[str]:
        """The broken invariants of the claims, one sentence each; empty when all hold."""
        seqs = self._sequences
        wrong: list[str] = []
        for slot, claim in self.claims.items():
            if seqs.states[slot] not in (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.SWAPPED):
                wrong.append("a sequence claims blocks that can take none")
            elif claim.age != self.age(slot) or claim.owner_number != seqs.owners[slot] or claim.num_blocks < 1:
                wrong.append(f"the claim of sequence {int(seqs.ids[slot])} is not as old as its sequence")
        if self._oldest is not min(self.claims.values(), key=lambda claim: claim.age, default=None):
            wrong.append("the oldest claim is not the oldest")
        return wrong
