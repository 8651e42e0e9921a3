"""Who waits for blocks, and for whom blocks that come free are kept: what can run finishes, whoever asks (PROTOCOL section 5).

Owns the claims of one pool: starts and reservations that steps were refused, and the one total order that decides between
them: higher priority first, then the smaller start number. The eldest claim is owed its blocks: no younger start is granted,
no younger reservation takes what is owed, and sessions that run younger sequences are told to give back. Reservations claim
as starts do: of two engines whose last sequences both want one more block, neither asks for a start.

A claim is forgotten when it is granted, when its sequence or session ends, and when it was not asked for again: by the
session's next PATIENCE_STEPS steps, or for PATIENCE_SECONDS. So a client that gave up does not block the pool.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..blocks.block_pool import BlockPool
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
    """What a sequence was refused: so many blocks, the watermark included, asked for in that step at that time."""

    age: Age
    owner_number: int
    num_blocks: int
    step_id: int
    asked_at: float


class Claims:
    """The claims of one pool, by slot. `claims` is empty while blocks are enough, which is all that a step has to look at."""

    def __init__(self, sequences: SequenceTable, pool: BlockPool) -> None:
        self.claims: dict[int, Claim] = {}
        self.now = 0.0
        self._sequences = sequences
        self._pool = pool
        self._eldest: Claim | None = None  # of the claims

    @property
    def num_owed(self) -> int:
        """Blocks that the eldest claim waits for; 0 without one."""
        return self._eldest.num_blocks if self._eldest is not None else 0

    @property
    def most_owed(self) -> int:
        """Blocks that the largest claim waits for."""
        return max((claim.num_blocks for claim in self.claims.values()), default=0)

    # Asked

    def are_younger(self, slots: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these sequences come after the eldest claim."""
        if self._eldest is None:
            return np.zeros(len(slots), np.bool_)
        seqs = self._sequences
        younger = np.zeros(len(slots), np.bool_)
        columns = (-seqs.priorities[slots], seqs.start_numbers[slots], seqs.owners[slots], seqs.ids[slots])
        for column, value in zip(reversed(columns), reversed(self._eldest.age), strict=True):
            younger = (column > value) | ((column == value) & younger)
        return younger

    def is_younger(self, slot: int) -> bool:
        """Whether the sequence comes after the eldest claim: it may neither start nor take what is owed."""
        return self._eldest is not None and self.age(slot) > self._eldest.age

    def would_be_younger(self, priority: int) -> bool:
        """The same of a sequence that is yet to be created."""
        return self._eldest is not None and -priority >= self._eldest.age[0]

    def num_kept_from(self, slot: int) -> int:
        """Available blocks that this sequence may not have, because they are owed to an elder one."""
        return self.num_owed if self.is_younger(slot) else 0

    def num_give_back(self, owner: SessionState) -> int:
        """Blocks that the eldest claim still misses, told to whoever runs younger sequences; those that are coming count."""
        missing = self.num_owed - self._pool.num_available - self._pool.num_fenced
        if missing <= 0:
            return 0
        seqs = self._sequences
        running = np.flatnonzero((seqs.owners == owner.number) & (seqs.states == SequenceState.RUNNING))
        return missing if self.are_younger(running).any() else 0

    def age(self, slot: int) -> Age:
        seqs = self._sequences
        return -int(seqs.priorities[slot]), int(seqs.start_numbers[slot]), int(seqs.owners[slot]), int(seqs.ids[slot])

    # Told

    def refuse(self, owner: SessionState, slot: int, num_blocks: int) -> None:
        """A step of the owner asked for so many blocks for this sequence, in vain."""
        assert num_blocks > 0, "what needs no block is not refused"
        self.forget(slot)
        claim = self.claims[slot] = Claim(self.age(slot), owner.number, num_blocks, owner.step_id, self.now)
        if self._eldest is None or claim.age < self._eldest.age:
            self._eldest = claim

    def forget(self, slot: int) -> None:
        """The sequence got what it asked for, or asks no more."""
        claim = self.claims.pop(slot, None)
        if claim is not None and claim is self._eldest:
            self._eldest = min(self.claims.values(), key=lambda other: other.age, default=None)

    def forget_all(self, slots: Int64Array) -> None:
        for slot in self.claims.keys() & set(slots.tolist()):
            self.forget(slot)

    def change_age(self, slot: int) -> None:
        """The sequence has another priority now."""
        if slot in self.claims:
            self.claims[slot].age = self.age(slot)
            self._eldest = min(self.claims.values(), key=lambda other: other.age)

    def pass_time(self, now: float) -> None:
        """It is this late: claims that nobody has asked for again since long ago are forgotten."""
        self.now = now
        for slot in [slot for slot, claim in self.claims.items() if now - claim.asked_at >= PATIENCE_SECONDS]:
            self.forget(slot)

    def end_step(self, owner: SessionState) -> None:
        """A step of the owner has been answered: claims that its last steps did not ask for again are forgotten."""
        for slot, claim in list(self.claims.items()):
            if claim.owner_number == owner.number and owner.step_id - claim.step_id >= PATIENCE_STEPS:
                self.forget(slot)

    def check(self) -> list[str]:
        """What is wrong with the claims, one sentence each; empty when all is well."""
        seqs = self._sequences
        wrong: list[str] = []
        for slot, claim in self.claims.items():
            if seqs.states[slot] not in (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.SWAPPED):
                wrong.append("a sequence claims blocks that can take none")
            elif claim.age != self.age(slot) or claim.owner_number != seqs.owners[slot] or claim.num_blocks < 1:
                wrong.append(f"the claim of sequence {int(seqs.ids[slot])} is not as old as its sequence")
        if self._eldest is not min(self.claims.values(), key=lambda claim: claim.age, default=None):
            wrong.append("the eldest claim is not the eldest")
        return wrong
