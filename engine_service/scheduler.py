"""Scheduler: which tokens of which sequences a step computes.

One counter chases the other: a running sequence computes tokens [num_computed, num_tokens), in chunks while that is a
prompt, one while it decodes, and again from the start after a preemption; there are no phases. Continuations of one
prompt wait unforked, get their first tokens from the prompt's logits, and are forked once the prompt is committed.

Served in order of arrival, running sequences before starts; room.py has the rules for when blocks are short.
Pure: values in, values out; no clock, no wire. All calls come from the task that drives the steps.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from engine_service.assemble import assemble_work
from engine_service.plan import Int64Array, Limits, Plan, StepAnswer, Work
from engine_service.request import Int32Array, Request, Sequence, SequenceState
from engine_service.room import Room
from engine_service.running import IndexArray, RunningSequences
from engine_service.speculation import num_kept
from engine_service.waiting import WaitingSequences

NO_GUESSES: Mapping[int, Int32Array] = MappingProxyType({})
_STARTED, _LOADING, _NO_ROOM = 1, 2, 4  # StartResult of the protocol
_FORKED = 1  # ItemResult.OK of the protocol


class Scheduler:
    """Waiting and running sequences of one engine."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = _rows(limits)
        self.waiting = WaitingSequences()
        self.loading: dict[int, Sequence] = {}  # by sequence id; each has a row to come
        self._parents: dict[Sequence, None] = {}  # running ones with continuations to fork, in order
        self._num_arrivals = 0
        self.num_preemptions = 0
        self.room = Room()

    # -- arrivals and ends

    def add(self, request: Request) -> None:
        """Queue a request. Its first sequence must be created in the cache service before it can start."""
        assert 0 < len(request.prompt) < request.max_len <= self.limits.max_len
        request.arrival, self._num_arrivals = self._num_arrivals, self._num_arrivals + 1
        self.waiting.put(request.sequences[0])

    def next_to_create(self) -> Sequence | None:
        """The next sequence that the cache service should be told of; see WaitingSequences."""
        num_forks = sum(len(parent.request.unforked) for parent in self._parents)
        return self.waiting.next_to_create(self.limits.max_known_sequences - num_forks)

    def end(self, sequence: Sequence, *, discard: bool = False) -> None:
        """It will never compute again; the next step gives its blocks back. discard: what is not yet committed is not."""
        state, sequence.state = sequence.state, SequenceState.ENDED
        if state is SequenceState.RUNNING:
            assert sequence.row is not None
            self.running.ended[sequence.row] = True
            if discard:
                self.running.num_computed[sequence.row] = self.running.num_committed[sequence.row]
                self.running.discarded[sequence.row] = True
        elif state is SequenceState.WAITING:
            assert sequence.sequence_id is not None
            self.waiting.releases.append(sequence.sequence_id)
        elif state is SequenceState.LOADING:
            assert sequence.sequence_id is not None
            del self.loading[sequence.sequence_id]
            self.waiting.releases.append(sequence.sequence_id)
        if state in (SequenceState.NEW, SequenceState.CREATING, SequenceState.WAITING):
            self.waiting.remove(sequence)

    def reset(self, limits: Limits) -> list[Request]:
        """A new session: everything that lives starts again, from the tokens it holds. Answers what can never fit it."""
        for sequence in self.running.at(self.running.order):
            self.running.remove(sequence)
            if sequence.state is not SequenceState.ENDED:
                self.waiting.put(sequence)
            self._leave_children(sequence)
        for sequence in self.loading.values():
            self.waiting.put(sequence)
        self.loading.clear()
        self.waiting.forget_all()
        self.limits, self.running = limits, _rows(limits)
        self.room = Room()
        requests = {sequence.request: None for sequence in self.waiting.sequences}
        for request in requests:
            request.start_number = 0  # of another cache service, perhaps
        return [request for request in requests if request.max_len > limits.max_len]

    @property
    def num_waiting(self) -> int:
        return len(self.waiting.sequences)

    @property
    def num_running(self) -> int:
        return len(self.running.live)

    @property
    def is_empty(self) -> bool:
        """No sequence is known here, or to be given back."""
        return not (self.waiting.sequences or self.running.by_id or self.waiting.releases or self.loading)

    # -- one step

    def schedule(self, guesses: Mapping[int, Int32Array] = NO_GUESSES) -> Plan:
        """Plan a step; changes nothing but the next id.

        guesses: by row of a sequence that decodes, tokens that may follow; as many are checked as the budget has room for.
        """
        running = self.running
        order = running.order
        commit_rows = order[running.num_computed[order] > running.num_committed[order]]
        first_new, num_tokens = running.num_known[commit_rows], running.num_tokens[commit_rows]
        live = running.live
        num_free_rows = running.num_rows - len(live) - len(self.loading)
        live = live[running.num_left[live] > running.num_drawing[live]]
        num_new, budget = self._share_budget(live)
        forks = self._plan_forks(num_free_rows)
        reserve_rows, num_new = live[num_new > 0], num_new[num_new > 0]
        computed = running.num_computed[reserve_rows] + running.num_computing[reserve_rows]
        if guesses:
            guesses, num_guessed = self._fit_guesses(guesses, reserve_rows, num_new, budget)
            num_new, budget = num_new + num_guessed, budget - int(num_guessed.sum())
        num_growing = self._num_new_blocks(reserve_rows, computed + num_new)
        starts = self._plan_starts(budget, num_free_rows - len(forks), num_growing)
        start_lens = _column(len(sequence.token_ids) for sequence in starts)
        ended_rows = order[running.ended[order]]
        return Plan(
            commit_ids=running.sequence_ids[commit_rows],
            commit_lens=running.num_computed[commit_rows],
            commit_num_new=num_tokens - first_new,
            commit_tokens=running.gather_tokens(commit_rows, first_new, num_tokens - first_new),
            fork_parents=_ids(child.request.sequences[0] for child in forks),
            fork_children=np.array([self.waiting.draw_id() for _ in forks], np.int64),
            fork_lens=_column(len(child.request.prompt) for child in forks),
            release_ids=np.concatenate((running.sequence_ids[ended_rows], np.array(self.waiting.releases, np.int64))),
            start_ids=_ids(starts),
            start_max_new=_column(starts.values()),
            # One token is left to compute, also where stored logits could follow the whole prompt: the sampler wants a pass.
            start_max_hit=(start_lens - 1) * _column(sequence.request.look_up for sequence in starts),
            reserve_ids=running.sequence_ids[reserve_rows],
            reserve_min=computed + 1,
            reserve_max=computed + num_new,
            guesses=guesses,
            commit_rows=commit_rows,
            forked=tuple(forks),
            released=tuple(self.running.at(ended_rows)),
            started=tuple(starts),
            reserve_rows=reserve_rows,
        )

    def _share_budget(self, live: IndexArray) -> tuple[Int32Array, int]:
        """Tokens to compute for each live row, decodes before prompts, and what is left of the budget."""
        limits, running = self.limits, self.running
        known = running.num_tokens[live] + running.num_drawing[live]
        remaining = known - running.num_computed[live] - running.num_computing[live]
        num_new = np.minimum(remaining, limits.chunk_size)
        left = limits.token_budget - int(num_new.sum())
        if left >= 0:
            return num_new, left
        decodes = remaining == 1
        prompts = np.where(decodes, 0, num_new)
        left = limits.token_budget - int(decodes.sum())
        before = np.cumsum(prompts) - prompts
        return np.where(decodes, 1, np.clip(left - before, 0, prompts)).astype(np.int32), 0

    def _fit_guesses(
        self, guesses: Mapping[int, Int32Array], rows: IndexArray, num_new: Int32Array, budget: int
    ) -> tuple[dict[int, Int32Array], Int32Array]:
        """Of guesses for rows that compute their last token, those that the budget and the requests have room for."""
        fitting: dict[int, Int32Array] = {}
        num_guessed = np.zeros_like(num_new)
        is_last = self.running.num_computed[rows] + num_new == self.running.num_tokens[rows]
        for at in np.flatnonzero(is_last).tolist():
            row = int(rows[at])
            sequence = self.running.sequences[row]
            if row in guesses and sequence is not None:
                room = min(budget, sequence.request.max_new_tokens - sequence.num_output - 1)
                if (kept := guesses[row][: max(room, 0)]).size:
                    fitting[row], num_guessed[at] = kept, len(kept)
                    budget -= len(kept)
        return fitting, num_guessed

    def _plan_forks(self, num_free_rows: int) -> list[Sequence]:
        """Continuations whose first token is known, as far as there are rows and slots for them."""
        room = min(num_free_rows, self.limits.max_known_sequences - self.waiting.num_known)
        if room <= 0 or not self._parents:
            return []
        children = [child for parent in self._parents for child in parent.request.unforked if child.num_output]
        return children[:room]

    def _plan_starts(self, budget: int, num_free_rows: int, num_growing: int) -> dict[Sequence, int]:
        """Who of the waiting may start, with most new tokens."""
        starts: dict[Sequence, int] = {}
        if len(self.running.live) and not self.room.allows_starts(num_growing):
            return starts
        for sequence in self.waiting.sequences:
            if not budget or len(starts) == num_free_rows:
                break
            if sequence.state is SequenceState.WAITING:
                starts[sequence] = min(self.limits.chunk_size, len(sequence.token_ids), budget)
                budget -= starts[sequence]
                if self.room.was_refused(sequence):
                    break
        return starts

    def _num_new_blocks(self, rows: IndexArray, lens: Int32Array) -> int:
        needed = -(-lens // self.limits.block_size) - self.running.num_blocks[rows]
        return int(np.maximum(needed, 0).sum())

    def apply(self, plan: Plan, answer: StepAnswer) -> Work:
        """Take over what the cache service decided, and say what can be computed."""
        running = self.running
        running.num_committed[plan.commit_rows] = plan.commit_lens
        running.num_known[plan.commit_rows] += plan.commit_num_new
        self.room.note_answer(answer)
        # Duplicates were adopted by the commits, before the forks; copies were made for the reservations, after them.
        copied = np.isin(answer.update_block_ids, answer.copy_destinations)
        self._update_tables(answer, ~copied)
        self._take_releases_and_forks(plan, answer)
        self._update_tables(answer, copied)
        self._count_copies(answer, copied)
        running.append_blocks(plan.reserve_rows, answer.new_block_item_idx, answer.new_block_ids)
        running.num_reserved[plan.reserve_rows] = answer.reserve_reserved
        self._take_ready(answer)
        start_rows = self._take_starts(plan, answer)
        granted = answer.reserve_reserved >= plan.reserve_min
        rows = np.concatenate((plan.reserve_rows[granted], start_rows))
        targets = np.concatenate((plan.reserve_max[granted], running.num_reserved[start_rows]))
        preempted: tuple[Sequence, ...] = ()
        if granted.all() and not answer.num_give_back:
            self.room.note_growth()
        elif victim := self.room.choose_victim(running.at(running.live), answer):
            kept = rows != victim.row
            rows, targets = rows[kept], targets[kept]
            self._preempt(victim)
            preempted = (victim,)
        # Since the plan was made, a step has ended: sequences with it, or short of what was counted on when it failed.
        rows, targets = rows[~running.ended[rows]], targets[~running.ended[rows]]
        num_new = np.minimum(targets, running.num_reserved[rows]) - running.num_computed[rows]
        if not plan.guesses:
            num_new = np.minimum(num_new, running.num_tokens[rows] - running.num_computed[rows])
        rows, num_new = rows[num_new > 0], num_new[num_new > 0]
        running.put_guesses(plan.guesses)
        work = assemble_work(running, rows, num_new, plan.guesses, answer, tuple(running.at(start_rows)), preempted)
        running.num_computing[rows] = num_new
        running.num_drawing[work.sample_rows] = 1
        return work

    def advance(self, work: Work, drawn: Int32Array) -> list[Int32Array]:
        """The work is done; drawn [len(work.logit_idx)] are the next tokens. Answers those that each of work.sampled gets.

        That is one, and one more for each leading guess that equals what was drawn at its place.
        """
        running = self.running
        running.num_computed[work.rows] += np.where(running.discarded[work.rows], 0, work.num_new)
        running.num_computing[work.rows] = running.num_drawing[work.rows] = 0
        num_rows = len(work.sample_rows)
        if len(drawn) == len(work.sampled):
            running.append_tokens(work.sample_rows, drawn[:num_rows])
            taken = list(drawn[:, None])
        else:
            taken = self._take_guesses(work, drawn)
        for sequence, token_ids in zip(work.sampled, taken, strict=True):
            sequence.num_output += len(token_ids)
            if sequence.row is not None:
                running.num_left[sequence.row] -= len(token_ids)
        for child, token_ids in zip(work.sampled[num_rows:], taken[num_rows:], strict=True):
            child.token_ids = np.append(child.request.prompt, token_ids).astype(np.int32)
            self._parents[child.request.sequences[0]] = None
        return taken

    def _take_guesses(self, work: Work, drawn: Int32Array) -> list[Int32Array]:
        """As advance; the slots of guesses that were not kept are computed again, with other tokens."""
        taken, first = [], 0
        for guesses in work.guesses:
            own = drawn[first : first + len(guesses) + 1]
            first += len(own)
            taken.append(own[: num_kept(guesses, own) + 1])
        for row, guesses, token_ids in zip(work.sample_rows.tolist(), work.guesses, taken, strict=False):
            self.running.num_computed[row] -= len(guesses) + 1 - len(token_ids)
            self.running.append_run(row, token_ids)
        return taken

    def fail(self, work: Work) -> None:
        """The work was not done: what was counted on does not come. Its requests have ended, or are to."""
        self.running.num_computing[work.rows] = self.running.num_drawing[work.rows] = 0

    def histories(self, work: Work) -> list[Int32Array]:
        """Tokens before each token that is drawn, in the order of work.logit_idx; views, good until advance."""
        running, num_rows = self.running, len(work.sample_rows)
        lens = running.num_tokens[work.sample_rows].tolist()
        rows = zip(work.sample_rows.tolist(), lens, work.guesses, strict=False)
        histories = [running.tokens[row, : length + place] for row, length, own in rows for place in range(len(own) + 1)]
        return histories + [child.token_ids for child in work.sampled[num_rows:]]

    # -- what an answer changes

    def _update_tables(self, answer: StepAnswer, chosen: npt.NDArray[np.bool_]) -> None:
        running = self.running
        columns = (answer.update_ids, answer.update_table_idx, answer.update_block_ids)
        for sequence_id, table_idx, block_id in zip(*(column[chosen].tolist() for column in columns), strict=True):
            row = running.by_id.get(sequence_id)  # a sequence released in this step has none any more
            if row is not None:
                running.tables[row, table_idx] = block_id

    def _count_copies(self, answer: StepAnswer, copied: npt.NDArray[np.bool_]) -> None:
        for sequence_id in answer.update_ids[copied].tolist():
            sequence = self.running.sequences[self.running.by_id[sequence_id]]
            assert sequence is not None
            sequence.request.num_copied_blocks += 1

    def _take_releases_and_forks(self, plan: Plan, answer: StepAnswer) -> None:
        """Released rows make room for forked children, but a child's table comes from its parent's row."""
        tables = [self._shared_table(child) for child in plan.forked]
        self.waiting.num_known -= len(plan.release_ids)
        del self.waiting.releases[: len(plan.release_ids) - len(plan.released)]  # what came since is behind them
        for sequence in plan.released:
            self.running.remove(sequence)
            self.room.note_end()
        answers = zip(plan.forked, plan.fork_children.tolist(), tables, answer.fork_results.tolist(), strict=True)
        for child, child_id, table, result in answers:
            if result == _FORKED:
                self.waiting.num_known += 1
                if child.state is SequenceState.ENDED:  # since the plan was made
                    self.waiting.releases.append(child_id)
                    continue
                child.sequence_id, child.state = child_id, SequenceState.RUNNING
                shared = len(child.request.prompt)
                self.running.add(child, num_computed=shared, num_known=shared, num_reserved=shared, table=table)
        for sequence in plan.released:
            self._leave_children(sequence)
        self._parents = {parent: None for parent in self._parents if parent.request.unforked}

    def _shared_table(self, child: Sequence) -> Int32Array:
        """The part of the parent's block table that a child forked now shares."""
        row = child.request.sequences[0].row
        return self.running.tables[row, : -(-len(child.request.prompt) // self.limits.block_size)].copy()

    def _leave_children(self, parent: Sequence) -> None:
        """A parent gave its blocks back: continuations that were not forked yet start by themselves."""
        self._parents.pop(parent, None)
        for child in parent.request.unforked:
            if child.num_output:
                self.waiting.put(child)

    def _take_starts(self, plan: Plan, answer: StepAnswer) -> IndexArray:
        """Rows of the sequences that started."""
        rows = []
        refused = []
        ends = np.cumsum(answer.start_num_blocks).tolist()
        columns = (answer.start_results, answer.start_hits, answer.start_reserved, answer.start_num_blocks)
        items = zip(plan.started, ends, *(column.tolist() for column in columns), strict=True)
        for sequence, end, result, hit_len, reserved, num_blocks in items:
            if sequence.state is SequenceState.ENDED:
                continue  # since the plan was made; its release is noted already
            if result == _STARTED:
                self.waiting.remove(sequence)
                sequence.state = SequenceState.RUNNING
                if sequence.request.num_hit_tokens is None:
                    sequence.request.num_hit_tokens = hit_len
                table = answer.start_block_ids[end - num_blocks : end]
                num_known = len(sequence.token_ids)
                rows.append(self.running.add(sequence, hit_len, num_known, reserved, table))
            elif result == _LOADING:
                assert sequence.sequence_id is not None
                self.waiting.remove(sequence)
                sequence.state = SequenceState.LOADING
                self.loading[sequence.sequence_id] = sequence
            elif result == _NO_ROOM:
                refused.append(sequence)
        if plan.started:
            self.room.note_starts(refused)
        return np.array(rows, np.intp)

    def _take_ready(self, answer: StepAnswer) -> None:
        """What was loading has its blocks now, and computes from the next step on."""
        ends = np.cumsum(answer.ready_num_blocks).tolist()
        columns = (answer.ready_ids, answer.ready_hits, answer.ready_reserved, answer.ready_num_blocks)
        for end, sequence_id, hit_len, reserved, num_blocks in zip(ends, *(column.tolist() for column in columns), strict=True):
            sequence = self.loading.pop(sequence_id, None)
            if sequence is not None:
                sequence.state = SequenceState.RUNNING
                if sequence.request.num_hit_tokens is None:
                    sequence.request.num_hit_tokens = hit_len
                table = answer.ready_block_ids[end - num_blocks : end]
                self.running.add(sequence, hit_len, len(sequence.token_ids), reserved, table)

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.sequence_id is not None
        self.waiting.releases.append(sequence.sequence_id)
        self.running.remove(sequence)
        sequence.request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put(sequence)
        self._leave_children(sequence)


def _rows(limits: Limits) -> RunningSequences:
    num_rows = min(limits.max_running, limits.token_budget)  # whoever runs computes a token a step
    return RunningSequences(num_rows, limits.max_len, limits.block_size)


def _ids(sequences: Iterable[Sequence]) -> Int64Array:
    return np.array([sequence.sequence_id for sequence in sequences], np.int64)


def _column(values: Iterable[int]) -> Int32Array:
    return np.array(list(values), np.int32)
