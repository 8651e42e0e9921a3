"""SelectVictims: which of a session's running sequences to preempt, so that blocks come free.

Owns the orders, chosen by name, and one rule for all: what comes free is worked out for the set so far, so a block that two
forks share comes free with the second of them only, and a sequence that frees nothing is not chosen. Changes nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..values.errors import InvalidField
from ..values.types import Int64Array, SequenceState, SessionId


class Victims(NamedTuple):
    """Slots in the order to preempt them, and for each the blocks that come free when it and those before it go."""

    slots: list[int]
    num_freed: list[int]


# state, candidates' slots -> the slots, first victim first
Order = Callable[[PoolState, Int64Array], Int64Array]


def _by(*keys: np.ndarray) -> Int64Array:
    """Indices by the first key, equals by the next."""
    return np.lexsort(keys[::-1])


def _priority(state: PoolState, slots: Int64Array) -> Int64Array:
    seqs = state.sequences
    return slots[_by(seqs.priorities[slots], -seqs.start_numbers[slots], -seqs.ids[slots])]


def _lru(state: PoolState, slots: Int64Array) -> Int64Array:
    return slots[_by(state.sequences.accesses.last[slots], -state.sequences.start_numbers[slots])]


def _lfu(state: PoolState, slots: Int64Array) -> Int64Array:
    return slots[_by(state.sequences.accesses.counts[slots], -state.sequences.start_numbers[slots])]


def _longest_first(state: PoolState, slots: Int64Array) -> Int64Array:
    return slots[_by(-state.sequences.num_tokens[slots], -state.sequences.start_numbers[slots])]


def _adaptive(state: PoolState, slots: Int64Array) -> Int64Array:
    """Loss per block that only the sequence holds: tokens to compute again, less where it was not used for long.

    What is published may well be hit again before it is evicted, so it counts half.
    """
    seqs = state.sequences
    alone = np.array([state.blocks_left.num_held_once(seqs.tables.held(slot)) for slot in slots.tolist()])
    num_published = seqs.num_published[slots] * seqs.block_size
    loss = seqs.num_committed[slots] - num_published / 2
    idle = np.maximum(0.0, state.now - seqs.accesses.last[slots])
    return slots[_by(loss / np.maximum(alone, 1) / (1 + idle), -seqs.start_numbers[slots])]


_ORDERS: dict[str, Order] = {
    "priority": _priority,
    "lru": _lru,
    "lfu": _lfu,
    "longest_first": _longest_first,
    "adaptive": _adaptive,
}


class VictimCalls:
    """Selects victims in one pool."""

    def __init__(self, state: PoolState) -> None:
        self._state = state

    def select(self, session: SessionId, policy: str, num_blocks: int, max_utilization: float | None = None) -> Victims:
        """Which of the session's sequences to preempt until num_blocks come free (0: one victim), or until so much is held.

        As few as are enough; all that are of use where that is not enough. Raises UnknownSession, InvalidField.
        """
        owner = self._state.session(session)
        if max_utilization is not None:
            num_blocks = self._state.blocks_left.num_used_above(max_utilization)
            if num_blocks <= 0:
                return Victims([], [])
        return self._choose(owner, policy, max(num_blocks, 1))

    def _choose(self, owner: SessionState, policy: str, num_blocks: int) -> Victims:
        if policy not in _ORDERS:
            raise InvalidField(f"unknown policy {policy!r}", field="policy", limit=", ".join(_ORDERS))
        seqs, slots = self._state.sequences, owner.ids.items()[1]
        # A step in flight writes what it reserved; preempted now, its sequence would lose what it is about to gain.
        slots = slots[
            (seqs.states[slots] == SequenceState.RUNNING) & (seqs.last_reserve_step[slots] <= owner.completed_step_id)
        ]
        if not len(slots):
            return Victims([], [])
        return self._enough(_ORDERS[policy](self._state, slots).tolist(), num_blocks)

    def _enough(self, order: list[int], num_blocks: int) -> Victims:
        """The first victims that free so many blocks together; victims that share their blocks come last."""
        order = sorted(order, key=lambda slot: self._alone(slot) == 0)
        freed = self._freed_by(order)
        count = next((at + 1 for at, num_freed in enumerate(freed) if num_freed >= num_blocks), len(order))
        chosen, wanted = order[:count], freed[count - 1]
        # One that frees nothing when it goes may be one of several that share their blocks: needed where the others go as well.
        for slot in [slot for at, slot in enumerate(chosen) if freed[at] == (freed[at - 1] if at else 0)]:
            without = [other for other in chosen if other != slot]
            if without and self._freed_by(without)[-1] == wanted:
                chosen = without
        total = self._freed_by(chosen)
        return Victims(chosen, total) if total[-1] else Victims([], [])

    def _alone(self, slot: int) -> int:
        """Blocks that come free when one sequence alone is preempted."""
        return self._freed_by([slot])[0]

    def _freed_by(self, slots: list[int]) -> list[int]:
        """Blocks that come free when each sequence and those before it are preempted."""
        return self._state.blocks_left.freed_by(self._state.sequences.tables.held(slot) for slot in slots)
