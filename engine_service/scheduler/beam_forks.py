"""BeamForks: sequences of a beam search, which part and are given up step by step.

Each list of a search is a sequence. When all of them have been computed to their last tokens, the likeliest continuations go
on: one of them in its parent's place, further ones of the same parent as forks of it, at its whole length. A list that
waits for the others of its search rests: it keeps its blocks to be forked from, but needs them no more, because what the model
said of it is known. So rows, slots and blocks can always be had from it, and its continuations start by themselves then.
Searches therefore never wait for each other for ever, and a list that is preempted is one sequence like any other. Pure.
"""

import numpy as np

from ..values.beam_values import Branch
from ..values.request import Request, Sequence, SequenceState
from .plan import Plan
from .state.scheduler_state import SchedulerState
from .state.transitions import move_to


class BeamForks:
    """Turns the branches of a search into sequences, and sees when all searches wait for each other."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def branch(self, request: Request, branches: list[Branch]) -> None:
        """The lists of a search that go on, all of which have been computed to their last tokens; the others are given up."""
        state = self._state
        running = state.running
        parents = {sequence.index: sequence for sequence in request.sequences}
        lists: list[Sequence] = []
        for branch in branches:
            parent = parents[branch.parent]
            is_running = parent.state is SequenceState.RUNNING
            if is_running and branch.slot == branch.parent:
                lists.append(parent)
                continue
            token_ids = np.append(state.tokens_of(parent), branch.token_id).astype(np.int32)
            num_output = parent.num_output + 1
            child = Sequence(request, branch.slot, token_ids, SequenceState.UNFORKED, num_output=num_output)
            lists.append(child)
            if is_running:
                child.parent = parent
                state.unforked[child] = None
            else:
                state.waiting.put(child)
        kept = set(lists)
        for sequence in parents.values():
            if sequence not in kept and sequence.row is not None:
                move_to(sequence, SequenceState.ENDED)
                running.ended[sequence.row] = True
        for branch, sequence in zip(branches, lists, strict=True):
            if sequence.row is not None and sequence is parents.get(branch.slot):
                running.append_run(sequence.row, np.array([branch.token_id], np.int32))
                running.num_left[sequence.row] -= 1
                sequence.num_output += 1
        request.sequences = lists
        if state.waiting.shares is not None:
            state.waiting.shares.charge(request.tenant, len(branches))

    def next_to_create(self) -> Sequence | None:
        """The next sequence that the cache service should be told of; see WaitingSequences.

        Slots are left for what is to be forked: a search forks before it gives up.
        """
        state = self._state
        running, waiting = state.running, state.waiting
        num_slots = state.limits.max_known_sequences - len(state.unforked)
        if running.num_searching:
            searches = {sequence.request for sequence in running.at(running.searching)}
            if (sequence := waiting.next_to_create(num_slots, searches)) is not None:
                return sequence
            num_slots -= sum(request.num_rows - 1 for request in searches)
        return waiting.next_to_create(num_slots)

    def stands_still(self, plan: Plan) -> bool:
        """Nothing is asked for, given back, computed, loaded or created, and a list rests."""
        state = self._state
        running = state.running
        if not running.num_searching:
            return False
        asked = (plan.reserve_ids, plan.start_ids, plan.release_ids, plan.swap_out_ids, plan.swap_in_ids)
        moves = any(len(ids) for ids in asked) or bool(state.loading)
        if moves or running.num_computing[running.order].any():
            return False
        return not state.waiting.is_creating(state.limits.max_known_sequences) and bool(state.resting())
