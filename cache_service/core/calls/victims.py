"""Which of a session's running sequences are preempted, so that blocks come free: a policy orders them, the set is chosen here.

Owns the orders, chosen by name, and one rule for all: what comes free is worked out for the set so far, so a block that two
forks share comes free with the second of them only, and a sequence that frees nothing is not chosen. Changes no sequence; the
hand of `clock` moves. Does not know sessions but their Owner.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..sequences.session_state import SessionState
from ..tables.lifecycle import SequenceLifecycle
from ..values.errors import InvalidField
from ..values.types import Int32Array, Int64Array, SequenceState


class Victims(NamedTuple):
    """Slots in the order to preempt them, and for each the blocks that come free when it and those before it go."""

    slots: list[int]
    num_freed: list[int]


Order = Callable[
    [SequenceLifecycle, Int64Array, float], Int64Array
]  # tables, candidates' slots, now -> the slots, first victim first


def _by(*keys: np.ndarray) -> Int64Array:
    """Indices by the first key, equals by the next."""
    return np.lexsort(keys[::-1])


def _priority(tables: SequenceLifecycle, slots: Int64Array, now: float) -> Int64Array:
    seqs = tables.sequences
    return slots[_by(seqs.priorities[slots], -seqs.start_numbers[slots], -seqs.ids[slots])]


def _lru(tables: SequenceLifecycle, slots: Int64Array, now: float) -> Int64Array:
    return slots[_by(tables.sequences.last_access[slots], -tables.sequences.start_numbers[slots])]


def _lfu(tables: SequenceLifecycle, slots: Int64Array, now: float) -> Int64Array:
    return slots[_by(tables.sequences.num_accesses[slots], -tables.sequences.start_numbers[slots])]


def _longest_first(tables: SequenceLifecycle, slots: Int64Array, now: float) -> Int64Array:
    return slots[_by(-tables.sequences.num_tokens[slots], -tables.sequences.start_numbers[slots])]


def _fifo(tables: SequenceLifecycle, slots: Int64Array, now: float) -> Int64Array:
    return slots[_by(tables.sequences.start_numbers[slots], tables.sequences.ids[slots])]


def _adaptive(tables: SequenceLifecycle, slots: Int64Array, now: float) -> Int64Array:
    """Loss per block that only the sequence holds: tokens to compute again, less where nobody used it for long.

    What is published may well be hit again before it is evicted, so it counts half.
    """
    seqs, pool = tables.sequences, tables.pool
    alone = np.array([np.count_nonzero(pool.ref_counts[seqs.held(slot)] == 1) for slot in slots.tolist()])
    num_published = seqs.num_published[slots] * seqs.block_size
    loss = seqs.num_committed[slots] - num_published / 2
    idle = np.maximum(0.0, now - seqs.last_access[slots])
    return slots[_by(loss / np.maximum(alone, 1) / (1 + idle), -seqs.start_numbers[slots])]


class _Clock:
    """In turn by slot, from the hand on; who was used since the hand last came by is passed over once."""

    def __init__(self, num_slots: int) -> None:
        self._hand = 0
        self._seen: Int64Array = np.zeros(num_slots, np.int64)  # accesses when the hand came by

    def __call__(self, tables: SequenceLifecycle, slots: Int64Array, now: float) -> Int64Array:
        num_accesses = tables.sequences.num_accesses[slots]
        is_used = num_accesses != self._seen[slots]
        self._seen[slots] = num_accesses
        return slots[_by(is_used, (slots - self._hand) % len(self._seen))]

    def move_past(self, slot: int) -> None:
        self._hand = (slot + 1) % len(self._seen)


class VictimChooser:
    """The policies of one pool."""

    def __init__(self, tables: SequenceLifecycle) -> None:
        self._tables = tables
        self._clock = _Clock(len(tables.sequences.ids))
        self._orders: dict[str, Order] = {
            "priority": _priority,
            "lru": _lru,
            "lfu": _lfu,
            "longest_first": _longest_first,
            "fifo": _fifo,
            "clock": self._clock,
            "adaptive": _adaptive,
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._orders)

    def choose(self, owner: SessionState, policy: str, num_blocks: int, now: float) -> Victims:
        """As few as free num_blocks, 1 or more; all that are of use where that is not enough. Raises InvalidField."""
        if policy not in self._orders:
            raise InvalidField(f"unknown policy {policy!r}", field="policy", limit=", ".join(self._orders))
        seqs, slots = self._tables.sequences, owner.ids.items()[1]
        # A step in flight writes what it reserved; preempted now, its sequence would lose what it is about to gain.
        slots = slots[
            (seqs.states[slots] == SequenceState.RUNNING) & (seqs.last_reserve_step[slots] <= owner.completed_step_id)
        ]
        if not len(slots):
            return Victims([], [])
        chosen = self._enough(self._orders[policy](self._tables, slots, now).tolist(), num_blocks)
        if policy == "clock" and chosen.slots:
            self._clock.move_past(chosen.slots[-1])
        return chosen

    def _enough(self, order: list[int], num_blocks: int) -> Victims:
        """The first that free so many blocks together; only for want of others those that share what they would free."""
        order = sorted(order, key=lambda slot: self._alone(slot) == 0)
        freed = self._freed_by(order)
        count = next((at + 1 for at, num_freed in enumerate(freed) if num_freed >= num_blocks), len(order))
        chosen, wanted = order[:count], freed[count - 1]
        # Who frees nothing when it goes may be one of several that share their blocks: needed where the others go as well.
        for slot in [slot for at, slot in enumerate(chosen) if freed[at] == (freed[at - 1] if at else 0)]:
            without = [other for other in chosen if other != slot]
            if without and self._freed_by(without)[-1] == wanted:
                chosen = without
        total = self._freed_by(chosen)
        return Victims(chosen, total) if total[-1] else Victims([], [])

    def _alone(self, slot: int) -> int:
        """Blocks that come free when it alone goes."""
        return self._freed_by([slot])[0]

    def _freed_by(self, slots: list[int]) -> list[int]:
        """Blocks that come free by each and those before it: nothing else holds them, a pin neither."""
        pool, total = self._tables.pool, 0
        left: dict[int, int] = {}
        freed: list[int] = []
        for slot in slots:
            for block in self._tables.sequences.held(slot).tolist():
                left[block] = left.get(block, int(pool.ref_counts[block])) - 1
                total += not left[block] and not pool.busy_counts[block]
            freed.append(total)
        return freed


def surplus(tables: SequenceLifecycle, slot: int) -> Int32Array:
    """Blocks behind the known tokens of a running sequence, the last one first."""
    seqs = tables.sequences
    return seqs.table(slot)[seqs.num_blocks(int(seqs.num_tokens[slot])) :][::-1].copy()
