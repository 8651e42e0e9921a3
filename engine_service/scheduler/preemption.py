"""Preemptor: takes blocks back from running sequences so that others can go on, and lets the victims resume.

A victim is chosen while an answer is applied, when the device computes nothing for it any more. It keeps its row until the next
step. That step commits its computed tokens and then either releases it or swaps it out. A released sequence starts again and
computes the tokens that are no longer cached. For a swapped-out one the host tier keeps K and V under its sequence id; it waits
in its place by arrival, and after its swap-in goes on from the same token. If a swap fails, because the host tier is full or a
transfer failed, the sequence is computed again. Pure.
"""

from ..values.request import Sequence, SequenceState, move_to
from .forks import Forks
from .headroom import Victim
from .plan import Plan, StepAnswer, Task
from .scheduler_state import SchedulerState

_OK = 1  # ItemResult of the protocol


class Preemptor:
    """Takes blocks back from running sequences, and queues each victim so that it goes on later."""

    def __init__(self, state: SchedulerState, forks: Forks) -> None:
        self._state = state
        self._forks = forks

    def by_importance(self) -> list[Sequence]:
        """Running sequences; the last one gives way first.

        A resting list gives way before the last sequence that computes, and before the other lists of its search.
        """
        state = self._state
        running = state.running.at(state.running.live)
        resting = state.resting()
        if not resting:
            return running
        if len(running) - len(resting) > 1:
            resting = [sequence for sequence in resting if sequence.request is running[-1].request][-1:]
        return [sequence for sequence in running if sequence not in resting] + resting

    def preempt(self, victim: Sequence) -> bool:
        """The sequence computes no more; the next step takes its blocks. Returns whether it is swapped out."""
        state, running, row = self._state, self._state.running, victim.row
        assert row is not None
        victim.request.num_preemptions += 1
        state.num_preemptions += 1
        self._forks.start_children_alone(victim)
        if state.rests(victim):  # what the model says of it is known: there is nothing to keep, nor to compute again
            assert victim.sequence_id is not None
            state.waiting.releases.append(victim.sequence_id)
            running.remove(victim)
            move_to(victim, SequenceState.ENDED)
            return False
        victim.num_computed = int(running.num_computed[row])
        move_to(victim, SequenceState.LEAVING)
        running.ended[row] = True
        num_blocks = running.num_held(row)
        running.swapping[row] = is_swap = self._prefers_swap(victim, num_blocks)
        if is_swap:
            state.headroom.note_swap_out(num_blocks)
        return is_swap

    def _prefers_swap(self, victim: Sequence, num_blocks: int) -> bool:
        state, limits = self._state, self._state.limits
        cost = Victim(victim.num_computed, self.num_shareable(victim), num_blocks, len(state.running.live) + 1)
        return state.costs.prefers_swap(cost, limits.preemption, limits.num_host_blocks, limits.block_bytes)

    def num_shareable(self, sequence: Sequence) -> int:
        """The number of its computed tokens that it may find in the prefix cache again."""
        request, limits, most = sequence.request, self._state.limits, sequence.num_computed
        if not (request.look_up and limits.prefix_caching):
            return 0
        if request.retention is not None:
            most = min(most, request.retention.num_tokens)  # what is behind them is private
        return most // limits.hit_unit * limits.hit_unit

    def _recompute(self, sequence: Sequence) -> None:
        """Release the sequence in the cache service, and queue it anew."""
        assert sequence.sequence_id is not None
        self._state.waiting.releases.append(sequence.sequence_id)
        self._state.waiting.put(sequence)

    # -- swaps

    def take_swap_outs(self, plan: Plan, answer: StepAnswer) -> tuple[tuple[Task, ...], tuple[Sequence, ...]]:
        """The sequences swapped out now, and those for which there was no room. All of them leave their rows."""
        if not plan.swapped_out:
            return (), ()
        state, done, refused = self._state, [], []
        for sequence, result in zip(plan.swapped_out, answer.swap_out_results.tolist(), strict=True):
            assert sequence.row is not None
            assert sequence.sequence_id is not None
            sequence.num_known = int(state.running.num_known[sequence.row])
            state.running.remove(sequence)
            if sequence.state is SequenceState.ENDED:  # since the plan was made
                state.waiting.releases.append(sequence.sequence_id)
            elif result == _OK:
                state.waiting.put_swapped(sequence)
                state.num_swapped_out += 1
                done.append(Task(sequence, sequence.num_computed, 0))
            else:
                self._recompute(sequence)
                refused.append(sequence)
        return tuple(done), tuple(refused)

    def take_swap_ins(self, plan: Plan, answer: StepAnswer) -> tuple[tuple[Task, ...], list[Sequence]]:
        """The sequences now RETURNING, until an answer says that they are ready, and those for which there was no room."""
        if not plan.swapped_in:
            return (), []
        state, done, refused = self._state, [], []
        for sequence, result in zip(plan.swapped_in, answer.swap_in_results.tolist(), strict=True):
            if sequence.state is SequenceState.ENDED:
                continue  # since the plan was made; its release is noted already
            if result == _OK:
                assert sequence.sequence_id is not None
                state.waiting.remove(sequence)
                if state.loads_have_failed:  # it may share a block with a sequence whose order failed, and wait for that order
                    sequence.num_computed = 0
                    self._recompute(sequence)
                    continue
                move_to(sequence, SequenceState.RETURNING)
                state.loading[sequence.sequence_id] = sequence
                done.append(Task(sequence, sequence.num_computed, 0))
            else:
                refused.append(sequence)
        return tuple(done), refused

    def recompute_returned(self, sequence_id: int, num_blocks: int) -> None:
        """A swap-out failed: the sequence is on the device, where others need its blocks, so it is computed again.

        A sequence that has ended is left alone.
        """
        waiting = self._state.waiting
        swapped = (other for other in waiting.sequences if other.state is SequenceState.SWAPPED)
        for sequence in [other for other in swapped if other.sequence_id == sequence_id]:
            waiting.remove(sequence)
            self._recompute(sequence)
            self._state.headroom.note_release(num_blocks)

    def give_up_loads(self) -> None:
        """A transfer failed: no answer would report a swap-in as ready, so all returning sequences are computed again."""
        state = self._state
        state.loads_have_failed = True
        for sequence_id, sequence in list(state.loading.items()):
            if sequence.state is SequenceState.RETURNING:
                del state.loading[sequence_id]
                sequence.num_computed = 0  # of which nothing is to be learnt
                self._recompute(sequence)
