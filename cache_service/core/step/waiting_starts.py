"""What a start will find, for sequences that wait, looked up before their step comes.

Owns the hits that are known ahead, of the few sequences of a session that will most likely start next. Rules: a hit counts only
while the pool is as it was at the look-up, and is looked up again otherwise. No hit is known where the step may find more: what
it commits, what another one of its starts computes, stored logits. Changes nothing.
"""

from typing import NamedTuple

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..tables.prefix_lookup import PrefixLookup
from ..values.types import Int32Array, SequenceState

_NUM_AHEAD = 4  # sequences; a session starts few at a time, but for bursts
_ALL = 2**31 - 1


class WaitingStart(NamedTuple):
    """A waiting sequence, and what it hits.

    hit [k]: blocks. first_block: the tenant's root and the first block of tokens.
    """

    slot: int
    num_tokens: int
    root: int
    hit: Int32Array
    first_block: tuple[int, bytes]


class LookedUp(NamedTuple):
    """What was looked up ahead: for the session of this number, while the pool is at this revision and its index unchanged."""

    session: int
    revision: int
    num_index_changes: int
    starts: dict[int, WaitingStart]  # by sequence id


class WaitingStarts:
    """Looks up the waiting sequences of one pool."""

    def __init__(self, state: PoolState, lookup: PrefixLookup) -> None:
        self._state = state
        self._sequences = state.sequences
        self._lookup = lookup
        self._ahead = LookedUp(0, 0, 0, {})  # the last one: a step of another session makes an earlier one useless

    def look_ahead(self, owner: SessionState) -> None:
        """Looks up the waiting sequences of the session that will most likely start next."""
        seqs, rivals = self._sequences, dict[int, tuple[bytes, ...]]()
        slots = ((seqs.states == SequenceState.WAITING) & (seqs.owners == owner.number)).nonzero()[0]
        slots = slots[np.lexsort((seqs.start_numbers[slots], -seqs.priorities[slots]))[:_NUM_AHEAD]]
        found = {int(seqs.ids[slot]): self._look_up(slot, _ALL, rivals) for slot in slots.tolist()}
        starts = {sequence_id: start for sequence_id, start in found.items() if start is not None}
        self._ahead = LookedUp(owner.number, self._state.revision, self._state.index.num_changes, starts)

    def find(self, owner: SessionState, sequence_ids: list[int], max_hits: list[int]) -> list[WaitingStart] | None:
        """What these starts of one step hit at most; None where one is not lawful, or its hit is not known."""
        rivals: dict[int, tuple[bytes, ...]] = {}
        is_current = self._ahead[:3] == (owner.number, self._state.revision, self._state.index.num_changes)
        is_current = is_current and not self._lookup.have_outlived()
        ahead = self._ahead.starts if is_current else {}
        found = []
        for sequence_id, max_hit in zip(sequence_ids, max_hits, strict=True):
            start = ahead.get(sequence_id)
            if start is None or len(start.hit) * self._sequences.block_size > max_hit:
                slot = owner.ids.get(sequence_id)
                if slot is None or self._sequences.states[slot] != SequenceState.WAITING or max_hit < 0:
                    return None
                start = self._look_up(slot, max_hit, rivals)
            if start is None:
                return None
            found.append(start)
        # One of two that begin alike may find what the other one computes, and the same one twice is not lawful.
        return found if len(found) < 2 or len({start.first_block for start in found}) == len(found) else None

    def _look_up(self, slot: int, max_hit: int, rivals: dict[int, tuple[bytes, ...]]) -> WaitingStart | None:
        state, seqs = self._state, self._sequences
        nodes = None if state.index.logits.by_node else self._lookup.sure_match(slot, max_hit, rivals)
        if nodes is None:
            return None
        hit = state.index.block_of_node[nodes]
        if len(hit) and state.pool.fence_counts[hit].any():
            return None
        return WaitingStart(slot, int(seqs.num_tokens[slot]), int(seqs.roots[slot]), hit, self._lookup.first_block(slot))
