"""Branching: sequences of a beam search, which part and are given up step by step.

Each list of a search is a sequence. When all of them have been computed to their last tokens, the likeliest continuations go
on: one of them in its parent's place, further ones of the same parent as forks of it, at its whole length. A list that
waits for the others of its search rests: it keeps its blocks to be forked from, but needs them no more, because what the model
said of it is known. So rows, slots and blocks can always be had from it, and its continuations start by themselves then.
Searches therefore never wait for each other for ever, and a list that is preempted is one sequence like any other. Pure.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from ..outputs.beam_search import Branch
from ..values.request import Int32Array, Request, Sequence, SequenceState
from .apply_answer import Answering
from .plan import Plan, StepAnswer, Work
from .planner import NO_GUESSES


class Branching(Answering):
    """See the module; a part of the scheduler."""

    def schedule(self, now: float, guesses: Mapping[int, Int32Array] = NO_GUESSES) -> Plan:
        """As Planning's, but when nobody can go on, a list that rests gives its blocks back first."""
        plan = super().schedule(now, guesses)
        if self.running.num_searching and self._stands_still(plan):
            self._preempt(self._resting()[-1])
            plan = super().schedule(now, guesses)
        return plan

    def apply(self, plan: Plan, answer: StepAnswer) -> Work:
        """As Answering's; the same when a start found no room and nothing is computed."""
        work = super().apply(plan, answer)
        has_asked = plan.started or plan.swapped_in
        if self.running.num_searching and work.batch is None and has_asked and self.room.refused_start:
            for sequence in self._resting()[-1:]:
                self._preempt(sequence)
                news = dataclasses.replace(work.news, preempted=(*work.news.preempted, sequence))
                work = dataclasses.replace(work, news=news)
        return work

    def branch(self, request: Request, branches: list[Branch]) -> None:
        """The lists of a search that go on, all of which have been computed to their last tokens; the others are given up."""
        running = self.running
        parents = {sequence.index: sequence for sequence in request.sequences}
        lists: list[Sequence] = []
        for branch in branches:
            parent = parents[branch.parent]
            is_running = parent.state is SequenceState.RUNNING
            if is_running and branch.slot == branch.parent:
                lists.append(parent)
                continue
            token_ids = np.append(self.tokens_of(parent), branch.token_id).astype(np.int32)
            num_output = parent.num_output + 1
            child = Sequence(request, branch.slot, token_ids, SequenceState.UNFORKED, num_output=num_output)
            lists.append(child)
            if is_running:
                child.parent = parent
                self._unforked[child] = None
            else:
                self.waiting.put(child)
        kept = set(lists)
        for sequence in parents.values():
            if sequence not in kept and sequence.row is not None:
                sequence.state, running.ended[sequence.row] = SequenceState.ENDED, True
        for branch, sequence in zip(branches, lists, strict=True):
            if sequence.row is not None and sequence is parents.get(branch.slot):
                running.append_run(sequence.row, np.array([branch.token_id], np.int32))
                running.num_left[sequence.row] -= 1
                sequence.num_output += 1
        request.sequences = lists
        if self.waiting.shares is not None:
            self.waiting.shares.charge(request.tenant, len(branches))

    def next_to_create(self) -> Sequence | None:
        """The next sequence that the cache service should be told of; see WaitingSequences.

        Slots are left for what is to be forked: a search forks before it gives up.
        """
        num_slots = self.limits.max_known_sequences - len(self._unforked)
        if self.running.num_searching:
            searches = {sequence.request for sequence in self.running.at(self.running.searching)}
            if (sequence := self.waiting.next_to_create(num_slots, searches)) is not None:
                return sequence
            num_slots -= sum(request.num_rows - 1 for request in searches)
        return self.waiting.next_to_create(num_slots)

    def tokens_of(self, sequence: Sequence) -> Int32Array:
        """Prompt and output so far; a view, good until it gets another token."""
        if sequence.row is None:
            return sequence.token_ids
        return self.running.tokens[sequence.row, : self.running.num_tokens[sequence.row]]

    def _may_give_way(self) -> list[Sequence]:
        """As Answering's, but a list that rests goes before the last one that computes, and before one of its own search."""
        running = super()._may_give_way()
        if not self.running.num_searching:
            return running
        resting = self._resting()
        if len(running) - len(resting) > 1:
            resting = [sequence for sequence in resting if sequence.request is running[-1].request][-1:]
        return [sequence for sequence in running if sequence not in resting] + resting

    def _resting(self) -> list[Sequence]:
        """Lists that wait for others of their search, the most important first."""
        return [sequence for sequence in self.running.at(self.running.searching) if self._rests(sequence)]

    def _stands_still(self, plan: Plan) -> bool:
        """Nothing is asked for, given back, computed, loaded or created, and a list rests."""
        running = self.running
        asked = (plan.reserve_ids, plan.start_ids, plan.release_ids, plan.swap_out_ids, plan.swap_in_ids)
        moves = any(len(ids) for ids in asked) or bool(self.loading)
        if moves or running.num_computing[running.order].any():
            return False
        return not self.waiting.is_creating(self.limits.max_known_sequences) and bool(self._resting())
