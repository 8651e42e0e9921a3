"""AnswerApplier: applies the cache service's answer to a plan, and says what can be computed now.

The lists of the answer are applied in the order of the protocol. Between plan and answer a step may have ended, and sequences
with it; or it is still computed, and the one that is planned runs ahead behind it. Pure.
"""

import numpy as np

from ..values.request import Int32Array, Sequence, SequenceState, move_to
from .batch_builder import assemble_work, rows_to_compute
from .forks import Forks
from .plan import NO_CHANGES, Plan, StepAnswer, StepChanges, StepWait, Work
from .preemption import Preemptor
from .running import NO_ROWS, IndexArray, choose
from .scheduler_state import SchedulerState

_STARTED, _LOADING, _NO_ROOM = 1, 2, 4  # StartResult of the protocol; COMPUTING waits, and asks again with the next step
_FORKED = 1  # ItemResult.OK of the protocol


class AnswerApplier:
    """Turns the answer to a plan into changes of the state and the work of the step."""

    def __init__(self, state: SchedulerState, forks: Forks, preemptor: Preemptor) -> None:
        self._state = state
        self._forks = forks
        self._preemptor = preemptor

    def find_wait(self, plan: Plan, answer: StepAnswer) -> StepWait | None:
        """Why this may not be applied while the step before is still computed; None: it may.

        Where blocks are short, what the step before says may spare a sequence that would give way. Where sequences move between
        tiers, an order may fail. The tokens of beam searches and guesses decide what follows, and those of rows with
        constraints what these may draw next.
        """
        state, running = self._state, self._state.running
        if len(plan.swap_out_ids) or len(plan.swap_in_ids) or len(answer.ready_ids) or state.loads_have_failed:
            return StepWait.TRANSFERS
        if plan.guesses:
            return StepWait.GUESSES
        if running.num_searching:
            return StepWait.BEAM_SEARCHES
        rows = plan.reserve_rows
        if running.num_constrained and (running.constrained[rows] & (running.num_drawing[rows] > 0)).any():
            return StepWait.CONSTRAINTS
        if answer.num_reclaim_hint:
            return StepWait.CLAIMS
        return StepWait.BLOCKS if np.count_nonzero(answer.reserve_reserved != plan.reserve_max) else None

    def apply(self, plan: Plan, answer: StepAnswer) -> Work:
        """Apply the cache service's decisions, in the order of the protocol. Returns the work that can be computed now."""
        state, preemptor = self._state, self._preemptor
        running, headroom = state.running, state.headroom
        running.num_committed[plan.commit_rows] = plan.commit_lens
        running.num_known[plan.commit_rows] += plan.commit_num_new
        headroom.note_answer(answer)
        self._update_tables(answer, are_copies=False)
        swapped_out, preempted = preemptor.take_swap_outs(plan, answer)  # forks and starts may get these rows
        child_rows = self._take_releases_and_forks(plan, answer)
        self._update_tables(answer, are_copies=True)
        rows, targets, is_all = self._take_reservations(plan, answer, child_rows)
        swapped_in, refused = preemptor.take_swap_ins(plan, answer)
        self._take_ready(answer)
        start_rows = self._take_starts(plan, answer, refused)
        if len(start_rows):
            rows = np.concatenate((rows, start_rows))
            targets = np.concatenate((targets, running.num_reserved[start_rows]))
        if is_all and not answer.num_reclaim_hint:
            headroom.note_growth()
        elif victim := headroom.choose_victim(preemptor.by_importance(), answer, is_stuck=not len(rows)):
            rows, targets = choose(rows != victim.row, rows, targets)
            if not preemptor.preempt(victim):
                preempted += (victim,)
        part = rows_to_compute(running, rows, targets, has_guesses=bool(plan.guesses))
        running.put_guesses(plan.guesses)
        if not len(part.rows) and (plan.started or plan.swapped_in) and headroom.refused_start:
            for resting in state.resting()[-1:]:  # a start found no room and nothing is computed: a list that rests gives way
                preemptor.preempt(resting)
                preempted += (resting,)
        changes = NO_CHANGES
        if len(start_rows) or preempted or swapped_out or swapped_in:
            changes = StepChanges(tuple(running.at(start_rows)), preempted, swapped_out, swapped_in)
        work = assemble_work(running, part, plan.guesses, answer, changes)
        running.num_computing[part.rows] += part.num_new
        running.num_drawing[work.sample_rows] += 1
        state.num_plans += 1
        return work

    def _update_tables(self, answer: StepAnswer, *, are_copies: bool) -> None:
        """Take over the blocks that tables now name in place of others.

        Duplicates were adopted by the commits, before the forks; copies were made for the reservations, after them: these are
        the last, one for each copy that does not just clear its destination.
        """
        if not len(answer.update_ids):
            return
        num_adopted, running = len(answer.update_ids) - np.count_nonzero(answer.copy_sources), self._state.running
        chosen = slice(num_adopted, None) if are_copies else slice(num_adopted)
        places = answer.update_table_idx
        if len(answer.update_groups):
            places = answer.update_groups * np.int32(running.table_width) + places
        for sequence_id, table_idx, block_id in zip(
            answer.update_ids[chosen].tolist(), places[chosen].tolist(), answer.update_block_ids[chosen].tolist(), strict=True
        ):
            # A sequence released in this step has no row any more: a copy for it has another owner by now, and was cleared.
            if (row := running.by_id.get(sequence_id)) is not None:
                running.tables[row, table_idx] = block_id
                if are_copies and (sequence := running.sequences[row]) is not None:
                    sequence.request.num_copied_blocks += 1

    def _take_releases_and_forks(self, plan: Plan, answer: StepAnswer) -> IndexArray:
        """Rows of plan.forked, -1 for a child without a row.

        Released rows make room for forked children, but a child's table comes from its parent's row.
        """
        state, forks = self._state, self._forks
        running, waiting = state.running, state.waiting
        if not (plan.forked or len(plan.release_ids)):
            forks.start_unforkable_alone()
            return NO_ROWS
        # Where states have gone on behind a fork, fewer tokens are committed than are known.
        lens = (answer.fork_committed if len(answer.fork_committed) else plan.fork_lens).tolist()
        tables = [forks.shared_table(child, length) for child, length in zip(plan.forked, lens, strict=True)]
        waiting.num_known -= len(plan.release_ids)
        del waiting.releases[: len(plan.release_ids) - len(plan.released)]  # what came since is behind them
        for sequence in plan.released:
            running.remove(sequence)
            if sequence.state is SequenceState.LEAVING:
                waiting.put(sequence)
            else:
                state.headroom.note_end()
        rows = np.full(len(plan.forked), -1, np.intp)
        results = zip(plan.forked, plan.fork_children.tolist(), tables, lens, answer.fork_results.tolist(), strict=True)
        for place, (child, child_id, table, length, result) in enumerate(results):
            if result == _FORKED:
                waiting.num_known += 1
            if child.state is SequenceState.ENDED:  # since the plan was made
                if result == _FORKED:
                    waiting.releases.append(child_id)
            elif result == _FORKED:
                forks.detach(child)
                child.sequence_id = child_id
                move_to(child, SequenceState.RUNNING)
                num_known = len(child.token_ids) - 1
                rows[place] = running.add(child, length, num_known, length, table)
            else:
                forks.start_alone(child)
        for sequence in plan.released:
            forks.start_children_alone(sequence)
        forks.start_unforkable_alone()
        return rows

    def _take_reservations(self, plan: Plan, answer: StepAnswer, child_rows: IndexArray) -> tuple[IndexArray, Int32Array, bool]:
        """The rows that got what they need at least, up to which token each may compute, and whether these are all."""
        running, rows, reserved = self._state.running, plan.reserve_rows, answer.reserve_reserved
        least, most = plan.reserve_min, plan.reserve_max
        items, block_ids, groups = answer.new_block_item_idx, answer.new_block_ids, answer.new_block_groups
        if len(child_rows):
            there = np.concatenate((rows, child_rows)) >= 0  # a child may have no row
            kept = there[items]
            items, block_ids = (np.cumsum(there) - 1)[items[kept]], block_ids[kept]
            groups = groups[kept] if len(groups) else groups
            rows, reserved, least, most = choose(there, np.concatenate((rows, child_rows)), reserved, least, most)
        running.append_blocks(rows, items, block_ids, groups)
        running.num_reserved[rows] = reserved
        is_granted = reserved >= least
        granted, targets = choose(is_granted, rows, np.minimum(most, reserved))
        return granted, targets, len(granted) == len(rows)

    def _take_starts(self, plan: Plan, answer: StepAnswer, refused: list[Sequence]) -> IndexArray:
        """Rows of the sequences that started. refused: swap-ins for which there was no room."""
        state = self._state
        if not (plan.started or plan.swapped_in):
            return NO_ROWS
        waiting, rows = state.waiting, []
        counts = answer.start_num_blocks * np.int32(state.limits.num_groups)
        ends = np.cumsum(counts).tolist()
        columns = (answer.start_results, answer.start_hits, answer.start_reserved, counts)
        items = zip(plan.started, ends, *(column.tolist() for column in columns), strict=True)
        for sequence, end, result, hit_len, reserved, num_blocks in items:
            if sequence.state is SequenceState.ENDED:
                continue  # since the plan was made; its release is noted already
            if result == _STARTED:
                waiting.remove(sequence)
                move_to(sequence, SequenceState.RUNNING)
                self._note_start(sequence, hit_len)
                table = answer.start_block_ids[end - num_blocks : end]
                num_known = len(sequence.token_ids)
                rows.append(state.running.add(sequence, hit_len, num_known, reserved, table))
            elif result == _LOADING:
                assert sequence.sequence_id is not None
                waiting.remove(sequence)
                move_to(sequence, SequenceState.LOADING)
                state.loading[sequence.sequence_id] = sequence
            elif result == _NO_ROOM:
                refused.append(sequence)
                waiting.start_refused(sequence)
        state.headroom.note_starts(refused)
        return np.array(rows, np.intp)

    def _take_ready(self, answer: StepAnswer) -> None:
        """The loads of these sequences have ended: they compute from the next step on."""
        state = self._state
        if not len(answer.ready_ids):
            return
        counts = answer.ready_num_blocks * np.int32(state.limits.num_groups)
        ends = counts.cumsum().tolist()
        columns = (answer.ready_ids, answer.ready_hits, answer.ready_reserved, counts)
        for end, sequence_id, hit_len, reserved, num_blocks in zip(ends, *(column.tolist() for column in columns), strict=True):
            sequence = state.loading.pop(sequence_id, None)
            table = answer.ready_block_ids[end - num_blocks : end]
            if sequence is None:
                self._preemptor.recompute_returned(sequence_id, int(np.count_nonzero(table)))
                continue
            num_computed, num_known = hit_len, len(sequence.token_ids)
            if sequence.state is SequenceState.RETURNING:
                num_computed, num_known, sequence.num_computed = sequence.num_computed, sequence.num_known, 0
            else:
                self._note_start(sequence, hit_len)
            move_to(sequence, SequenceState.RUNNING)
            state.running.add(sequence, num_computed, num_known, reserved, table)

    def _note_start(self, sequence: Sequence, hit_len: int) -> None:
        """The sequence has started, for the first time or again, and found so many of its tokens cached."""
        request, state = sequence.request, self._state
        if request.num_hit_tokens is None:
            request.num_hit_tokens = hit_len
            if (shares := state.waiting.shares) is not None:  # its tenant does not pay again when it gave way and starts anew
                shares.start(shares.tenant_of(request), len(sequence.token_ids) - hit_len, state.waiting.now)
        if sequence.num_computed:
            state.costs.note_restart(hit_len, self._preemptor.num_shareable(sequence))
            sequence.num_computed = 0
