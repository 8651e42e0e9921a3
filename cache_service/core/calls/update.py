"""UpdateSequence: what of a living sequence may be changed beside its steps.

Priority counts from the next decision on. Retention is never widened, because what was dropped is gone; what it drops now
waits for the steps that were told of it, and the session hears of the holes in its next reply.
"""

import numpy as np

from ..sequences.retention import drop_outside
from ..step.apply import StepApplier
from ..step.validate import wrong_state
from ..values.errors import InvalidField, UnknownSequence
from ..values.sequence_args import Retention
from ..values.types import SequenceState, SessionId

_LEAST_PRIORITY, _MOST_PRIORITY = -1000, 1000


class SequenceUpdates(StepApplier):
    """See the module."""

    def update_sequence(
        self, session: SessionId, sequence_id: int, *, priority: int | None = None, retention: Retention | None = None
    ) -> None:
        """Changes what is given, all or nothing; the same again changes nothing.

        Raises UnknownSequence, InvalidField, WrongState (retention of a sequence that is swapped or loading).
        """
        slot, seqs = self._owner(session).ids.get(sequence_id), self.tables.sequences
        if slot is None:
            raise UnknownSequence(f"no sequence {sequence_id} in this session", sequence_id=sequence_id)
        if priority is not None and not _LEAST_PRIORITY <= priority <= _MOST_PRIORITY:
            limit = _LEAST_PRIORITY if priority < _LEAST_PRIORITY else _MOST_PRIORITY
            raise InvalidField(f"priority is {_LEAST_PRIORITY} to {_MOST_PRIORITY}", field="priority", limit=limit)
        if retention is not None:
            if seqs.states[slot] not in (SequenceState.WAITING, SequenceState.RUNNING):
                raise wrong_state(sequence_id, int(seqs.states[slot]))
            _check_narrower(seqs.retention(slot), retention)
        if priority is not None and priority != seqs.priorities[slot]:
            self.revision += 1
            seqs.priorities[slot] = priority
            self.tables.claims.change_age(slot)
        if retention is not None and retention != seqs.retention(slot):
            self.revision += 1
            self._narrow(session, slot, retention)
            self._note_change()

    def _narrow(self, session: SessionId, slot: int, retention: Retention) -> None:
        seqs = self.tables.sequences
        self._publish()  # so far attention was whole
        seqs.retain(slot, retention.num_sink_tokens, retention.num_window_tokens)
        if seqs.states[slot] == SequenceState.RUNNING:
            drop_outside(self.tables, self._owner(session), np.array([slot]), told_now=False)


def _check_narrower(held: Retention | None, wanted: Retention) -> None:
    for name in ("num_sink_tokens", "num_window_tokens"):
        if held is not None and getattr(wanted, name) > getattr(held, name):
            limit = getattr(held, name)
            raise InvalidField(f"retention is never widened: {name} is {limit}", field=f"retention.{name}", limit=limit)
