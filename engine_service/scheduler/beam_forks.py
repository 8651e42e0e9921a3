"""BeamForks: the sequences of a beam search, which are forked and dropped step by step.

Each list of a search is a sequence. When all lists of a search are computed to their last tokens, the likeliest continuations
go on: one in its parent's place, further ones of the same parent as forks at its whole length. A list that waits for the other
lists of its search rests. It keeps its blocks for forks, but needs them no more, because its logits are known. So a resting
list can always give up row, slot and blocks; its continuations then start by themselves. Therefore searches never wait for
each other for ever, and a list is preempted like any other sequence. Pure.
"""

import numpy as np

from ..values.beam_values import Branch
from ..values.request import Request, Sequence, SequenceState
from .plan import Plan
from .state.scheduler_state import SchedulerState
from .state.transitions import move_to


class BeamForks:
    """Turns the branches of a search into sequences, and detects when all searches wait for each other."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def branch(self, request: Request, branches: list[Branch]) -> None:
        """Continue a search with these lists, all computed to their last tokens; its other lists are dropped."""
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
            child = Sequence(request, branch.slot, token_ids, SequenceState.UNFORKED)
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
        request.sequences = lists
        if (shares := state.waiting.shares) is not None:
            shares.charge(shares.tenant_of(request), len(branches))

    def next_to_create(self) -> Sequence | None:
        """The next sequence to create in the cache service; see WaitingSequences.

        Slots are left for forks, because a search forks before it drops lists.
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
        """Whether nothing is requested, released, computed, loaded or created while a list rests."""
        state = self._state
        running = state.running
        if not running.num_searching:
            return False
        asked = (plan.reserve_ids, plan.start_ids, plan.release_ids, plan.swap_out_ids, plan.swap_in_ids)
        moves = any(len(ids) for ids in asked) or bool(state.loading)
        if moves or running.num_computing[running.order].any():
            return False
        return not state.waiting.is_creating(state.limits.max_known_sequences) and bool(state.resting())
