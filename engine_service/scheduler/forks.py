"""Forks: sequences that have a first token of their own and share all tokens before it with a running parent.

They wait unforked until a step has rows and slots for them. If the parent gives its blocks back first, or no longer keeps all
tokens that a fork would read, they start alone, with their own tokens.

BeamForks: the sequences of a beam search, which are forked and dropped step by step. Each list of a search is a sequence. When
all lists of a search are computed to their last tokens, the likeliest continuations run on: one in its parent's place, further
ones of the same parent as forks at its whole length. A list that waits for the other lists of its search rests. It keeps its
blocks for forks, but needs them no more, because its logits are known. So a resting list can always give up row, slot and
blocks; its continuations then start by themselves. Therefore searches never wait for each other for ever, and a list is
preempted like any other sequence. Pure.
"""

import numpy as np

from ..values.request import Int32Array, Request, Sequence, SequenceState, move_to
from ..values.sampling_params import Branch
from .plan import Plan
from .scheduler_state import SchedulerState


class Forks:
    """Decides which unforked sequences a step forks, and which have to start alone."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def plan(self, num_free_rows: int, most: int) -> list[Sequence]:
        """At most so many unforked sequences for which there are rows and slots; lists of a search have reserved rows."""
        state = self._state
        if not state.unforked:
            return []
        most = min(most, state.limits.max_known_sequences - state.waiting.num_known)
        forks: list[Sequence] = []
        for child in state.unforked:
            if len(forks) >= most:
                break
            if not self._may_fork(child, state.running.num_computed):
                continue
            if child.request.num_beams is None:
                if num_free_rows <= 0:
                    continue
                num_free_rows -= 1
            forks.append(child)
        return forks

    def _may_fork(self, child: Sequence, committed: Int32Array) -> bool:
        """Whether the parent, with so many tokens committed by row, still keeps all tokens that a fork would read."""
        retention, limits = child.request.retention, self._state.limits
        if child.parent is None:
            return True
        shared = len(child.token_ids) - 1
        if limits.num_groups > 1 and not limits.may_cut(int(committed[child.parent.row]), shared):
            return False
        if limits.has_states and self._state.running.num_reserved[child.parent.row] > shared:
            return False  # its state has gone on; a start finds the last one that is kept
        if retention is None:
            return True
        return retention.may_fork(int(committed[child.parent.row]), shared, limits.block_size)

    def shared_table(self, child: Sequence, num_tokens: int) -> Int32Array:
        """The part of the parent's block tables that a child forked now shares, of so many tokens."""
        assert child.parent is not None
        num_blocks = -(-num_tokens // self._state.limits.block_size)
        assert child.parent.row is not None
        return self._state.running.get_table(child.parent.row, num_blocks)

    def start_children_alone(self, parent: Sequence) -> None:
        """A parent gives its blocks back: its unforked children start alone."""
        for child in [child for child in self._state.unforked if child.parent is parent]:
            self.start_alone(child)

    def start_unforkable_alone(self) -> None:
        """Children start alone if their parent has committed beyond the window that a fork would read."""
        state = self._state
        if state.unforked and (state.running.num_retaining or state.limits.num_groups > 1):
            for child in [child for child in state.unforked if not self._may_fork(child, state.running.num_committed)]:
                self.start_alone(child)

    def start_alone(self, child: Sequence) -> None:
        """Queue a child that starts with its own tokens, not as a fork."""
        self.detach(child)
        self._state.waiting.put(child)

    def detach(self, child: Sequence) -> None:
        """The child needs its parent no more: it is forked, or starts alone."""
        del self._state.unforked[child]
        child.parent = None


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
            token_ids = np.append(state.get_tokens(parent), branch.token_id).astype(np.int32)
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
