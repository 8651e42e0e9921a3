"""The waiting sequences, in order of arrival, and how far the cache service knows of them.

A sequence is stored there (CreateSequence) while it waits, so that its start is one item of a step. The slots for that
are bounded; whoever runs or is to be forked from what runs has them first. Pure.
"""

import bisect
from collections.abc import Container

from engine_service.request import Request, Sequence, SequenceState


class WaitingSequences:
    """Owns the ids of sequences, and the count of those that the cache service knows."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []  # NEW, CREATING, WAITING and SWAPPED ones
        self.releases: list[int] = []  # ids of ended or preempted ones that the next step gives back
        self.num_known = 0  # sequences that the cache service knows, or is being told
        self._found_no_slot = False  # the last one that it was told of
        self._next_id = 1

    def put(self, sequence: Sequence) -> None:
        """At its place by arrival: who was preempted stands before whoever came later."""
        sequence.state, sequence.sequence_id = SequenceState.NEW, None
        bisect.insort(self.sequences, sequence, key=lambda other: other.key)

    def put_swapped(self, sequence: Sequence) -> None:
        """At its place by arrival too, and it stays known to the cache service, by its id."""
        sequence_id = sequence.sequence_id
        self.put(sequence)
        sequence.state, sequence.sequence_id = SequenceState.SWAPPED, sequence_id

    def remove(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)

    def draw_id(self) -> int:
        """A sequence id that was never used."""
        sequence_id, self._next_id = self._next_id, self._next_id + 1
        return sequence_id

    def next_to_create(self, max_known: int, among: Container[Request] | None = None) -> Sequence | None:
        """The first that the cache service should be told of, now CREATING under a fresh id; None for now."""
        if self.num_known and self.num_known >= max_known:
            return None
        new = (other for other in self.sequences if other.state is SequenceState.NEW)
        sequence = next((other for other in new if among is None or other.request in among), None)
        if sequence is not None:
            sequence.state, sequence.sequence_id = SequenceState.CREATING, self.draw_id()
            self.num_known += 1
        return sequence

    def is_creating(self, max_known: int) -> bool:
        """Whether the cache service is being told of one, or is about to be: not while it has no slot."""
        states = {sequence.state for sequence in self.sequences}
        has_slot = not self._found_no_slot and (not self.num_known or self.num_known < max_known)
        return SequenceState.CREATING in states or (SequenceState.NEW in states and has_slot)

    def created(self, sequence: Sequence) -> None:
        """The cache service knows it; it may have ended meanwhile."""
        self._found_no_slot = False
        if sequence.state is SequenceState.CREATING:
            sequence.state = SequenceState.WAITING
        else:
            assert sequence.sequence_id is not None
            self.releases.append(sequence.sequence_id)

    def create_refused(self, sequence: Sequence, *, try_again: bool) -> None:
        """The cache service does not know it: there is nothing to release. Without try_again its request is to end."""
        self.num_known -= 1
        self._found_no_slot = try_again
        sequence.sequence_id = None
        if try_again and sequence.state is SequenceState.CREATING:
            sequence.state = SequenceState.NEW

    def forget_all(self) -> None:
        """The cache service knows nothing any more."""
        for sequence in self.sequences:
            sequence.state, sequence.sequence_id, sequence.num_computed = SequenceState.NEW, None, 0
        self.releases.clear()
        self.num_known = 0
        self._found_no_slot = False
