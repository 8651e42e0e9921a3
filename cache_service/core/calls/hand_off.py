"""A running sequence changes its session, and no block is copied: one session offers it, another one takes it.

Owns the offers. Rules: a sequence is its giver's until it is taken, in one decision; an offer holds for the sequence as it was
offered, so whatever its giver does with it ends the offer; no step of the giver that works on it is in flight. Reference counts
do not change, because the same table names the same blocks.
"""

from collections import OrderedDict
from typing import NamedTuple

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..sequences.transitions import wrong_state
from ..step.validate import check_id
from ..values.errors import DuplicateSequence, NotImplementedYet, StepNotCompleted, UnknownOffer
from ..values.types import SequenceState, SessionId

_MOST_TAKEN = 1024  # of a session, that a repeat of its call still finds


class _Offer(NamedTuple):
    """A sequence as it was offered: its place, and all that changes with it."""

    giver: SessionId
    slot: int
    sequence_id: int
    counters: tuple[int, ...]


class HandOffCalls:
    """Hands over the sequences of one pool."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._sequences = state.sequences
        self._offers: dict[bytes, _Offer] = {}
        self._of_slot: dict[int, bytes] = {}  # the offer of each slot, the last one: there are no more of them than slots
        self._taken: dict[SessionId, OrderedDict[bytes, int]] = {}  # by the session that took: offers and its sequence ids

    def offer(self, session: SessionId, sequence_id: int, offer: bytes) -> bytes:
        """Offers a running sequence to the session that shows these random bytes. The same again: the bytes of before.

        Raises UnknownSession, UnknownSequence, WrongState, StepNotCompleted. Raises NotImplementedYet where layers have states,
        which may be ahead of what is committed.
        """
        state, seqs = self._state, self._sequences
        owner, slot = state.find_sequence(session, sequence_id)
        if seqs.has_states:
            text = "a sequence with recurrent layers does not change its session"
            raise NotImplementedYet(text, feature="layer_group_kind")
        if seqs.states[slot] != SequenceState.RUNNING:
            raise wrong_state(sequence_id, int(seqs.states[slot]))
        is_written = seqs.last_reserve_step[slot] > owner.completed_step_id
        if is_written or state.pool.is_filling[seqs.tables.held(slot)].any():
            text = f"a step that works on sequence {sequence_id} is not completed"
            raise StepNotCompleted(text, sequence_id=sequence_id, completed_step_id=owner.completed_step_id)
        made = _Offer(session, slot, sequence_id, self._counters(slot))
        known = self._of_slot.get(slot)
        if known is not None:
            if self._offers[known] == made:
                return known
            del self._offers[known]
        self._of_slot[slot], self._offers[offer] = offer, made
        return offer

    def withdraw(self, session: SessionId, sequence_id: int) -> None:
        """The giver continues with the sequence. Raises UnknownSession; UnknownSequence where it was taken."""
        _, slot = self._state.find_sequence(session, sequence_id)
        self._forget(slot)

    def take(self, session: SessionId, offer: bytes, sequence_id: int) -> None:
        """The sequence is this session's from now on, under this id; also where the call is repeated.

        Raises UnknownSession, UnknownOffer, DuplicateSequence.
        """
        state, seqs = self._state, self._sequences
        taker = state.session(session)
        check_id(sequence_id, "sequence_id")
        taken = self._taken.get(session)
        if taken is not None and taken.get(offer) == sequence_id and sequence_id in taker.ids:
            return
        found = self._offers.get(offer)
        if found is None or found.giver == session or not self._holds(found):
            raise UnknownOffer("no sequence is offered with these bytes on this pool")
        if sequence_id in taker.ids:
            raise DuplicateSequence(f"sequence {sequence_id} exists", sequence_id=sequence_id)
        state.publish()  # what the giver has committed, and what replaces its blocks
        state.revision += 1
        giver, slot = state.session(found.giver), found.slot
        self._forget(slot)
        state.claims.forget_claim(slot)
        giver.ids.remove(found.sequence_id)
        taker.ids.add(sequence_id, slot)
        seqs.change_owner(slot, taker.number, sequence_id, taker.completed_step_id)
        state.counters.num_hand_offs += 1
        self._note_taken(taker, offer, sequence_id)

    def _holds(self, offer: _Offer) -> bool:
        """Whether the sequence is still as it was offered."""
        giver = self._state.sessions.get(offer.giver)
        return (
            giver is not None
            and giver.ids.get(offer.sequence_id) == offer.slot
            and self._counters(offer.slot) == offer.counters
        )

    def _counters(self, slot: int) -> tuple[int, ...]:
        """What changes with each call and each step that names a sequence; the start number identifies the sequence."""
        seqs = self._sequences
        columns = (
            seqs.states,
            seqs.num_tokens,
            seqs.num_committed,
            seqs.num_reserved,
            seqs.last_reserve_step,
            seqs.start_numbers,
        )
        return tuple(int(column[slot]) for column in columns)

    def _forget(self, slot: int) -> None:
        offer = self._of_slot.pop(slot, None)
        if offer is not None:
            del self._offers[offer]

    def _note_taken(self, taker: SessionState, offer: bytes, sequence_id: int) -> None:
        sessions = self._state.sessions
        self._taken = {session: taken for session, taken in self._taken.items() if session in sessions}
        taken = self._taken.setdefault(taker.session, OrderedDict())
        taken[offer] = sequence_id
        if len(taken) > _MOST_TAKEN:
            taken.popitem(last=False)
