"""Deciding a step: whether every item of it is valid, before anything changes.

Owns the checks of a StepBatch and nothing else: check_step raises, or returns the slots that the items name. Commits and
reservations, which name every running sequence, are checked as columns; the other lists are short and are walked, on an
overlay that shows each item the sequences as the items before it leave them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..sequences.sequence_table import SequenceTable
from ..sequences.session_state import SessionState
from ..sequences.spans import Holes, find_holes
from ..sequences.transitions import wrong_state
from ..values.distinct import has_repeats
from ..values.errors import DuplicateSequence, InvalidField, UnknownSequence
from ..values.step_columns import StepBatch
from ..values.types import MAX_ID, NO_INT64, NULL_BLOCK, Int32Array, Int64Array, SequenceId, SequenceState

# These checks are a third of a step, and what they cost is the number of calls into numpy. So the common case is looked at
# with few: that all rows of a column are equal is seen by comparing bytes, and that no number is negative by the sign that is
# left when all are or-ed together. Which row is wrong is found out afterwards, by plain comparisons.
_RUNNING, _WAITING = np.int8(SequenceState.RUNNING), int(SequenceState.WAITING)
_RUNNING_BYTE = _RUNNING.tobytes()
_ONE = np.int32(1)
_ONE_BYTES = np.array([1], "<i4").tobytes()
_ZERO = np.int32(0)


class StepPlan(NamedTuple):
    """Slots of a valid step. reserve_slots is None when reservations may name children that the step makes.

    needs_published: it shares, cuts or moves blocks, so what was committed before has to be in the index first.
    """

    commit_slots: Int64Array
    start_slots: Int64Array
    reserve_slots: Int64Array | None
    needs_published: bool


class _Commits(NamedTuple):
    """Slots of valid commits. all_run: none of them is swapped, which commits may be and reservations may not."""

    slots: Int64Array
    all_run: bool


_NO_COMMITS = _Commits(NO_INT64, all_run=False)


@dataclass(slots=True)
class _Seen:
    """One sequence as the items so far leave it."""

    state: int
    num_committed: int
    max_tokens: int
    holes: Holes


def check_step(sequences: SequenceTable, owner: SessionState, batch: StepBatch) -> StepPlan:
    """Raises the CacheError of the first item that is not valid; changes nothing."""
    commits = _check_commits(sequences, owner, batch)
    commit_slots, start_slots = commits.slots, check_starts(sequences, owner, batch)
    if len(batch.fork_children) or len(batch.truncate_ids) or len(batch.release_ids) or has_swaps(batch):
        reserve_slots = _Walk(sequences, owner, batch).check(commits)
        needs_published = len(batch.fork_children) > 0 or len(batch.truncate_ids) > 0 or has_swaps(batch)
        return StepPlan(commit_slots, start_slots, reserve_slots, needs_published)
    reserve_slots = _check_reservations(sequences, owner, batch, commits)
    return StepPlan(commit_slots, start_slots, reserve_slots, needs_published=False)


def has_swaps(batch: StepBatch) -> bool:
    return len(batch.swap_out_ids) > 0 or len(batch.swap_in_ids) > 0


def check_id(sequence_id: int, field: str) -> SequenceId:
    if not 1 <= sequence_id <= MAX_ID:
        raise InvalidField("a sequence id is 1 to 2^53 - 1", field=field, limit=MAX_ID)
    return SequenceId(sequence_id)


def too_long(field: str, limit: int) -> InvalidField:
    return InvalidField(f"{field}: more than the sequence's {limit} tokens", field=field, limit=limit)


def _check_commits(sequences: SequenceTable, owner: SessionState, batch: StepBatch) -> _Commits:
    if not len(batch.commit_ids):
        if len(batch.commit_tokens):
            raise InvalidField("token ids without a commit", field="commit_token_ids")
        return _NO_COMMITS
    slots = owner.ids.find(batch.commit_ids, "commit_sequence_ids")
    lens, tokens = batch.commit_lens, batch.commit_tokens
    granted = sequences.num_reserved[slots]
    if batch.completed_step_id < owner.step_id:  # a step still runs: the tokens granted to it may not be committed yet
        runs = sequences.last_reserve_step[slots] > batch.completed_step_id
        granted = np.where(runs, sequences.num_reserved_before[slots], granted)
    if has_one_each(batch) and _are_running(sequences, slots):
        num_tokens = sequences.num_tokens[slots] + _ONE
        signs = lens - sequences.num_committed[slots]
        signs |= lens  # negative lengths, for which differences say nothing
        signs |= tokens
        signs |= np.minimum(granted, num_tokens) - lens
        signs |= sequences.max_tokens[slots] - num_tokens
        if not np.count_nonzero(signs < _ZERO):
            if sequences.has_states:
                _check_states(sequences, batch, slots)
            return _Commits(slots, all_run=True)
    _refuse_commits(sequences, batch, slots, granted)
    if sequences.has_states:
        _check_states(sequences, batch, slots)
    return _Commits(slots, all_run=False)  # as far as is known


def _check_states(sequences: SequenceTable, batch: StepBatch, slots: Int64Array) -> None:
    """Raises InvalidField for a length whose states no entry can hold. Lengths are valid otherwise; 0 needs none."""
    last = np.maximum(batch.commit_lens - 1, 0) // sequences.block_size
    for group in sequences.new_entries.state_groups:
        lost = (sequences.tables.rows[slots, last + group * sequences.max_blocks] == NULL_BLOCK) & (batch.commit_lens > 0)
        for at in lost.nonzero()[0].tolist():
            if sequences.states[slots[at]] == SequenceState.RUNNING:
                length, sequence_id = int(batch.commit_lens[at]), int(batch.commit_ids[at])
                text = (
                    f"sequence {sequence_id} keeps no states behind {length} tokens: a step computes up to what it was granted"
                )
                limit = int(sequences.num_reserved[slots[at]])
                raise InvalidField(text, field="commit_num_tokens", limit=limit, sequence_id=sequence_id)


def has_one_each(batch: StepBatch) -> bool:
    """Whether each commit brings one token: all commits of a step that decodes do."""
    count = len(batch.commit_ids)
    return len(batch.commit_tokens) == count and batch.commit_num_new.tobytes() == _ONE_BYTES * count


def _are_running(sequences: SequenceTable, slots: Int64Array) -> bool:
    return sequences.states[slots].tobytes() == _RUNNING_BYTE * len(slots)


def _refuse_commits(sequences: SequenceTable, batch: StepBatch, slots: Int64Array, granted: Int32Array) -> None:
    """Raises what is wrong with the first bad commit, if anything is."""
    num_new, lens = batch.commit_num_new, batch.commit_lens
    if int(num_new.min()) < 0 or int(num_new.sum(dtype=np.int64)) != len(batch.commit_tokens):
        raise InvalidField("counts of new tokens do not add up to the tokens", field="commit_num_new_tokens")
    if len(batch.commit_tokens) and int(batch.commit_tokens.min()) < 0:
        raise InvalidField("token ids are 0 to 2^31 - 1", field="commit_token_ids", limit=2**31 - 1)
    num_tokens = sequences.num_tokens[slots].astype(np.int64) + num_new
    limits = np.minimum(num_tokens, granted)
    bad = (lens < sequences.num_committed[slots]) | (lens > limits) | (num_tokens > sequences.max_tokens[slots])
    for at in (bad | (sequences.states[slots] != _RUNNING)).nonzero()[0].tolist():
        sequence_id, slot = int(batch.commit_ids[at]), slots[at]
        if sequences.states[slot] == SequenceState.SWAPPED and not bad[at]:
            continue  # steps before its swap-out
        if sequences.states[slot] not in (SequenceState.RUNNING, SequenceState.SWAPPED):
            raise wrong_state(sequence_id, int(sequences.states[slot]))
        if num_tokens[at] > sequences.max_tokens[slot]:
            raise too_long("commit_token_ids", int(sequences.max_tokens[slot]))
        raise InvalidField(
            f"sequence {sequence_id} may be committed from {int(sequences.num_committed[slot])} up to {int(limits[at])} "
            f"tokens, as completed step {batch.completed_step_id} left it",
            field="commit_num_tokens",
            limit=int(limits[at]),
            sequence_id=sequence_id,
        )


def _check_reservations(sequences: SequenceTable, owner: SessionState, batch: StepBatch, commits: _Commits) -> Int64Array:
    if not len(batch.reserve_ids):
        return NO_INT64
    slots = owner.ids.find(batch.reserve_ids, "reserve_sequence_ids")
    least, most = batch.reserve_min, batch.reserve_max
    if sequences.may_have_holes:
        _check_fits(sequences, batch, slots, commits.slots)
    if (commits.all_run and slots is commits.slots) or _are_running(sequences, slots):
        signs = least - _ONE
        signs |= least
        signs |= most
        signs |= most - least
        signs |= sequences.max_tokens[slots] - most
        if not np.count_nonzero(signs < _ZERO):
            return slots
    _check_lengths(batch)
    bad = (sequences.states[slots] != _RUNNING) | (most > sequences.max_tokens[slots])
    slot, sequence_id = slots[int(np.argmax(bad))], int(batch.reserve_ids[int(np.argmax(bad))])
    if sequences.states[slot] != SequenceState.RUNNING:
        raise wrong_state(sequence_id, int(sequences.states[slot]))
    raise too_long("reserve_max_tokens", int(sequences.max_tokens[slot]))


def check_starts(sequences: SequenceTable, owner: SessionState, batch: StepBatch) -> Int64Array:
    """Slots of the starts. Raises the CacheError of the first that is not valid."""
    if not len(batch.start_ids):
        return NO_INT64
    slots = owner.ids.find(batch.start_ids, "start_sequence_ids")
    for sequence_id, slot in zip(batch.start_ids.tolist(), slots.tolist(), strict=True):
        if sequences.states[slot] != _WAITING:
            raise wrong_state(sequence_id, int(sequences.states[slot]))
    if min(batch.start_max_new.tolist()) < 1:  # few as they are, lists are the shorter way
        raise InvalidField("a start computes 1 token or more", field="start_max_new_tokens", limit=1)
    if not {0, 1}.issuperset(batch.start_may_wait.tolist()):
        raise InvalidField("1 where the answer COMPUTING is welcome, else 0", field="start_may_wait", limit=1)
    if min(batch.start_max_hit.tolist()) < 0:
        raise InvalidField("a hit has 0 tokens or more", field="start_max_hit_tokens", limit=0)
    return slots


class _Walk:
    """Checks the items of the short lists, one by one: each sees the sequences as the items before it leave them."""

    def __init__(self, sequences: SequenceTable, owner: SessionState, batch: StepBatch) -> None:
        self._sequences, self._owner, self._batch = sequences, owner, batch
        self._seen: dict[int, _Seen] = {}
        self._released: set[int] = set()

    def check(self, commits: _Commits) -> Int64Array | None:
        """Forks, truncates, releases, swaps, then the starts and reservations they leave. Returns the reservations' slots."""
        sequences, batch = self._sequences, self._batch
        if len(batch.fork_children):
            self._check_forks()
        if len(batch.truncate_ids):
            self._check_truncates()
        _check_distinct_ids(batch.release_ids, "release_sequence_ids")
        for sequence_id in batch.release_ids.tolist():
            if sequence_id not in self._seen and sequence_id not in self._owner.ids:
                self._look(sequence_id)  # refuses it
            self._released.add(sequence_id)
        if has_swaps(batch):
            self._check_swaps()
        for sequence_id in [start_id for start_id in batch.start_ids.tolist() if start_id in self._released]:
            self._look(sequence_id)  # refuses it
        if not len(batch.fork_children) and not len(batch.truncate_ids) and not sequences.may_have_holes:
            # The usual step in which requests end and begin: nothing above changed the limits of a reservation.
            leaving = np.concatenate([batch.release_ids, batch.swap_out_ids])
            for at in (leaving[:, None] == batch.reserve_ids).any(1).nonzero()[0].tolist():
                self._look_running(int(leaving[at]))
            return _check_reservations(sequences, self._owner, batch, commits)
        self._check_reservations()
        return None if len(batch.fork_children) else self._owner.ids.find(batch.reserve_ids, "reserve_sequence_ids")

    def _look(self, sequence_id: int) -> _Seen:
        sequences, batch = self._sequences, self._batch
        if sequence_id in self._released:
            raise UnknownSequence(f"sequence {sequence_id} is released in this step", sequence_id=sequence_id)
        if sequence_id not in self._seen:
            slot = self._owner.ids.get(sequence_id)
            if slot is None:
                raise UnknownSequence(f"no sequence {sequence_id} in this session", sequence_id=sequence_id)
            view = _Seen(
                int(sequences.states[slot]),
                int(sequences.num_committed[slot]),
                int(sequences.max_tokens[slot]),
                find_holes(sequences, slot),
            )
            for at in (batch.commit_ids == sequence_id).nonzero()[0].tolist():
                view.num_committed = int(batch.commit_lens[at])
                view.holes = view.holes.after_commit(view.num_committed, sequences.block_size)
            self._seen[sequence_id] = view
        return self._seen[sequence_id]

    def _look_running(self, sequence_id: int) -> _Seen:
        view = self._look(sequence_id)
        if view.state != SequenceState.RUNNING:
            raise wrong_state(sequence_id, view.state)
        return view

    def _check_forks(self) -> None:
        batch, size = self._batch, self._sequences.block_size
        for parent_id, child_id, num_tokens in zip(
            batch.fork_parents.tolist(), batch.fork_children.tolist(), batch.fork_lens.tolist(), strict=True
        ):
            parent = self._look_running(parent_id)
            check_id(child_id, "fork_child_ids")
            if child_id in self._seen or self._owner.ids.get(child_id) is not None:
                raise DuplicateSequence(f"sequence {child_id} exists", sequence_id=child_id)
            if not 1 <= num_tokens <= parent.num_committed:
                raise InvalidField(
                    f"{num_tokens} tokens shared, 1 to {parent.num_committed} committed ones can be",
                    field="fork_num_tokens",
                    limit=parent.num_committed,
                )
            parent.holes.check_cut("fork_num_tokens", num_tokens, size)
            holes = parent.holes.after_cut(num_tokens, size)
            self._seen[child_id] = _Seen(SequenceState.RUNNING, num_tokens, parent.max_tokens, holes)

    def _check_truncates(self) -> None:
        batch, size = self._batch, self._sequences.block_size
        _check_distinct_ids(batch.truncate_ids, "truncate_sequence_ids")
        for sequence_id, num_tokens in zip(batch.truncate_ids.tolist(), batch.truncate_lens.tolist(), strict=True):
            target = self._look_running(sequence_id)
            if num_tokens < 1:
                raise InvalidField("a sequence keeps 1 token or more", field="truncate_num_tokens", limit=1)
            target.holes.check_cut("truncate_num_tokens", num_tokens, size)
            target.holes = target.holes.after_cut(num_tokens, size)

    def _check_swaps(self) -> None:
        """A step does not write a sequence that it swaps, so its reservation is refused, also if the swap is refused."""
        batch = self._batch
        _check_distinct_ids(batch.swap_out_ids, "swap_out_sequence_ids")
        for sequence_id in batch.swap_out_ids.tolist():
            target = self._look(sequence_id)
            if target.state not in (SequenceState.RUNNING, SequenceState.SWAPPED):
                raise wrong_state(sequence_id, target.state)
            target.state = SequenceState.SWAPPED
        _check_distinct_ids(batch.swap_in_ids, "swap_in_sequence_ids")
        for sequence_id in batch.swap_in_ids.tolist():
            target = self._look(sequence_id)
            if target.state == SequenceState.WAITING:
                raise wrong_state(sequence_id, target.state)
            if target.state == SequenceState.SWAPPED:
                target.state = SequenceState.LOADING

    def _check_reservations(self) -> None:
        batch = self._batch
        _check_distinct_ids(batch.reserve_ids, "reserve_sequence_ids")
        _check_lengths(batch)
        for sequence_id, least, most in zip(
            batch.reserve_ids.tolist(), batch.reserve_min.tolist(), batch.reserve_max.tolist(), strict=True
        ):
            target = self._look_running(sequence_id)
            if most > target.max_tokens:
                raise too_long("reserve_max_tokens", target.max_tokens)
            target.holes.check_fits("reserve_min_tokens", least, self._sequences)


def _check_fits(sequences: SequenceTable, batch: StepBatch, slots: Int64Array, commit_slots: Int64Array) -> None:
    """Only a sequence with holes may be longer than the pool; the part that it holds at once may not."""
    num_blocks = sequences.most_held_blocks // sequences.num_groups
    for at in np.flatnonzero(batch.reserve_min > num_blocks * sequences.block_size).tolist():
        holes = find_holes(sequences, int(slots[at]))
        for row in np.flatnonzero(commit_slots == slots[at]).tolist():
            holes = holes.after_commit(int(batch.commit_lens[row]), sequences.block_size)
        holes.check_fits("reserve_min_tokens", int(batch.reserve_min[at]), sequences)


def _check_lengths(batch: StepBatch) -> None:
    least, most = batch.reserve_min, batch.reserve_max
    if len(least) and (int(least.min()) < 1 or (least > most).any()):
        raise InvalidField("a reservation wants 1 token or more, and no less than its least", field="reserve_min_tokens")


def _check_distinct_ids(ids: Int64Array | Int32Array, field: str) -> None:
    if has_repeats(ids):
        raise InvalidField(f"{field} names a sequence twice", field=field)
