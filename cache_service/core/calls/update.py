"""UpdateSequence: what of a living sequence may be changed beside its steps.

Priority counts from the next decision on. Retention is never widened, because what was dropped is gone; what it drops now waits
for the steps in flight that may touch it, and the session hears of the holes in its next reply. A hint of reuse counts from now
on.
"""

import numpy as np

from ..pool_state import PoolState
from ..sequences.session_state import SessionState
from ..sequences.spans import refuse_retention
from ..sequences.transitions import wrong_state
from ..values.errors import InvalidField
from ..values.sequence_args import Retention
from ..values.types import ReuseHint, SequenceState, SessionId

_LEAST_PRIORITY, _MOST_PRIORITY = -1000, 1000


class SequenceUpdates:
    """Updates the sequences of one pool."""

    def __init__(self, state: PoolState) -> None:
        self._state = state

    def update(
        self,
        session: SessionId,
        sequence_id: int,
        *,
        priority: int | None = None,
        retention: Retention | None = None,
        reuse_hint: ReuseHint | None = None,
    ) -> None:
        """Changes what is given, all or nothing; the same again changes nothing.

        Raises UnknownSession, UnknownSequence, InvalidField, WrongState (retention of a sequence that is swapped or loading).
        """
        owner, slot = self._state.find_sequence(session, sequence_id)
        seqs = self._state.sequences
        if priority is not None and not _LEAST_PRIORITY <= priority <= _MOST_PRIORITY:
            limit = _LEAST_PRIORITY if priority < _LEAST_PRIORITY else _MOST_PRIORITY
            raise InvalidField(f"priority is {_LEAST_PRIORITY} to {_MOST_PRIORITY}", field="priority", limit=limit)
        if retention is not None:
            refuse_retention(seqs.group_spans)
            if seqs.states[slot] not in (SequenceState.WAITING, SequenceState.RUNNING):
                raise wrong_state(sequence_id, int(seqs.states[slot]))
            _check_narrower(seqs.retention(slot), retention)
        if priority is not None and priority != seqs.priorities[slot]:
            self._state.revision += 1
            seqs.update(slot, priority=priority)
            self._state.claims.change_age(slot)
        if retention is not None and retention != seqs.retention(slot):
            self._state.revision += 1
            self._narrow(owner, slot, retention)
            self._state.update_pressure()
        if reuse_hint is not None and reuse_hint != seqs.reuse_hints[slot]:
            self._state.revision += 1
            self._change_hint(slot, reuse_hint)

    def note_read(self, session: SessionId, sequence_id: int) -> None:
        """K and V of the sequence are read: an access like a step that names it."""
        _, slot = self._state.find_sequence(session, sequence_id)
        self._state.sequences.accesses.note(np.array([slot]), self._state.now)

    def _change_hint(self, slot: int, hint: ReuseHint) -> None:
        """What is published of the sequence is no longer as good as forgotten; NONE and SOON count with its end."""
        seqs, pool = self._state.sequences, self._state.pool
        pool.heed_hints()
        if seqs.reuse_hints[slot] == ReuseHint.NONE and pool.reuse is not None:
            pool.reuse.claim(seqs.tables.rows[slot, : int(seqs.num_published[slot])])
        seqs.update(slot, reuse_hint=hint, retain_seconds=0.0)

    def _narrow(self, owner: SessionState, slot: int, retention: Retention) -> None:
        seqs = self._state.sequences
        self._state.publish()  # so far attention was whole
        seqs.retain(slot, retention.num_sink_tokens, retention.num_window_tokens)
        if seqs.states[slot] == SequenceState.RUNNING:
            self._state.spans.drop_outside(owner, np.array([slot]), in_reply=False)


def _check_narrower(held: Retention | None, wanted: Retention) -> None:
    for name in ("num_sink_tokens", "num_window_tokens"):
        if held is not None and getattr(wanted, name) > getattr(held, name):
            limit = getattr(held, name)
            raise InvalidField(f"retention is never widened: {name} is {limit}", field=f"retention.{name}", limit=limit)
