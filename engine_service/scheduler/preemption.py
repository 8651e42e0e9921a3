"""Preempting: how running sequences give their blocks back so that others can go on, and how they come back.

A victim is chosen while an answer is taken over, when the device computes nothing for it any more. Its row stays until the
next step, which commits what it has computed, and then either releases it, so that it starts again and computes what is not
cached any more; or swaps it out. Then the host tier keeps its K and V under its sequence id, it waits in its place by arrival,
and once it is swapped in it goes on from the very token it was at. A swap that comes to nothing, for want of room in the host
tier or because a transfer failed, ends in computing again. Pure.
"""

from ..values.request import Sequence, SequenceState
from .plan import Plan, StepAnswer, Task
from .planner import Planning
from .state.preemption_cost import Victim

_OK = 1  # ItemResult of the protocol


class Preempting(Planning):
    """See the module; a part of the scheduler."""

    def give_up_loads(self) -> None:
        """A transfer has failed: a sequence that was being swapped in would hear of that no more, so it is computed again."""
        self._loads_have_failed = True
        for sequence_id, sequence in list(self.loading.items()):
            if sequence.state is SequenceState.RETURNING:
                del self.loading[sequence_id]
                sequence.num_computed = 0  # of which nothing is to be learnt
                self._recompute(sequence)

    def _may_give_way(self) -> list[Sequence]:
        """Running sequences; who gives way first stands last."""
        return self.running.at(self.running.live)

    def _preempt(self, victim: Sequence) -> None:
        """It computes no more from here on; its blocks go with the next step."""
        running, row = self.running, victim.row
        assert row is not None
        victim.request.num_preemptions += 1
        self.num_preemptions += 1
        self._leave_children(victim)
        if self._rests(victim):  # what the model says of it is known: there is nothing to keep, nor to compute again
            assert victim.sequence_id is not None
            self.waiting.releases.append(victim.sequence_id)
            running.remove(victim)
            victim.state = SequenceState.ENDED
            return
        victim.state, victim.num_computed = SequenceState.LEAVING, int(running.num_computed[row])
        running.ended[row] = True
        running.swapping[row] = self._prefers_swap(victim, row)
        if running.swapping[row]:
            self.room.note_swap_out(running.num_held(row))

    def _swaps(self, victim: Sequence) -> bool:
        """Whether one that was just preempted is to be swapped out."""
        return victim.row is not None and bool(self.running.swapping[victim.row])

    def _prefers_swap(self, victim: Sequence, row: int) -> bool:
        limits, num_blocks = self.limits, self.running.num_held(row)
        cost = Victim(victim.num_computed, self._num_shareable(victim), num_blocks, len(self.running.live) + 1)
        return self.costs.prefers_swap(cost, limits.preemption, limits.num_host_blocks, limits.block_bytes)

    def _num_shareable(self, sequence: Sequence) -> int:
        """Of the tokens that it had computed, those that it may find in the prefix cache."""
        request, most = sequence.request, sequence.num_computed
        if not (request.look_up and self.limits.prefix_caching):
            return 0
        if request.retention is not None:
            most = min(most, request.retention.num_tokens)  # what is behind them is private
        return most // self.limits.block_size * self.limits.block_size

    def _recompute(self, sequence: Sequence) -> None:
        """Release what the cache service holds of it, and queue it anew."""
        assert sequence.sequence_id is not None
        self.waiting.releases.append(sequence.sequence_id)
        self.waiting.put(sequence)

    def _leave_children(self, parent: Sequence) -> None:
        """A parent gave its blocks back: whoever was not forked yet starts by itself."""
        for child in [child for child in self._unforked if child.parent is parent]:
            self._start_alone(child)

    def _start_alone(self, child: Sequence) -> None:
        """From its own tokens, not as a fork."""
        self._take_from_parent(child)
        self.waiting.put(child)

    def _take_from_parent(self, child: Sequence) -> None:
        del self._unforked[child]
        child.parent = None

    # -- what an answer changes

    def _take_swap_outs(self, plan: Plan, answer: StepAnswer) -> tuple[tuple[Task, ...], tuple[Sequence, ...]]:
        """Those that are swapped out now, and those that there was no room for. All of them leave their rows."""
        done: tuple[Task, ...] = ()
        refused: tuple[Sequence, ...] = ()
        for sequence, result in zip(plan.swapped_out, answer.swap_out_results.tolist(), strict=True):
            assert sequence.row is not None
            assert sequence.sequence_id is not None
            sequence.num_known = int(self.running.num_known[sequence.row])
            self.running.remove(sequence)
            if sequence.state is SequenceState.ENDED:  # since the plan was made
                self.waiting.releases.append(sequence.sequence_id)
            elif result == _OK:
                self.waiting.put_swapped(sequence)
                self.num_swapped_out += 1
                done += (Task(sequence, sequence.num_computed, 0),)
            else:
                self._recompute(sequence)
                refused += (sequence,)
        return done, refused

    def _take_swap_ins(self, plan: Plan, answer: StepAnswer) -> tuple[tuple[Task, ...], list[Sequence]]:
        """Those that are RETURNING, until an answer says that they are ready, and those that there was no room for."""
        done: tuple[Task, ...] = ()
        refused: list[Sequence] = []
        for sequence, result in zip(plan.swapped_in, answer.swap_in_results.tolist(), strict=True):
            if sequence.state is SequenceState.ENDED:
                continue  # since the plan was made; its release is noted already
            if result == _OK:
                assert sequence.sequence_id is not None
                self.waiting.remove(sequence)
                if self._loads_have_failed:  # it may wait for the very order that failed, of a sequence it shares a block with
                    sequence.num_computed = 0
                    self._recompute(sequence)
                    continue
                sequence.state = SequenceState.RETURNING
                self.loading[sequence.sequence_id] = sequence
                done += (Task(sequence, sequence.num_computed, 0),)
            else:
                refused.append(sequence)
        return done, refused

    def _take_ready(self, answer: StepAnswer) -> None:
        """What was loading has its blocks now, and computes from the next step on."""
        ends = answer.ready_num_blocks.cumsum().tolist()
        columns = (answer.ready_ids, answer.ready_hits, answer.ready_reserved, answer.ready_num_blocks)
        for end, sequence_id, hit_len, reserved, num_blocks in zip(ends, *(column.tolist() for column in columns), strict=True):
            sequence = self.loading.pop(sequence_id, None)
            if sequence is None:
                self._take_failed_swap_out(sequence_id, num_blocks)
                continue
            num_computed, num_known = hit_len, len(sequence.token_ids)
            if sequence.state is SequenceState.RETURNING:
                num_computed, num_known, sequence.num_computed = sequence.num_computed, sequence.num_known, 0
            else:
                self._note_hit(sequence, hit_len)
            sequence.state = SequenceState.RUNNING
            self.running.add(sequence, num_computed, num_known, reserved, answer.ready_block_ids[end - num_blocks : end])

    def _take_failed_swap_out(self, sequence_id: int, num_blocks: int) -> None:
        """It is on the device again, where others need its blocks: it is computed again. Nothing to do where it has ended."""
        swapped = (other for other in self.waiting.sequences if other.state is SequenceState.SWAPPED)
        for sequence in [other for other in swapped if other.sequence_id == sequence_id]:
            self.waiting.remove(sequence)
            self._recompute(sequence)
            self.room.note_release(num_blocks)

    def _note_hit(self, sequence: Sequence, hit_len: int) -> None:
        """It has started, for the first time or again."""
        if sequence.request.num_hit_tokens is None:
            sequence.request.num_hit_tokens = hit_len
            if self.waiting.shares is not None:  # what it computes again, once it gave way, is not its tenant's fault
                num_tokens = len(sequence.token_ids) - hit_len
                self.waiting.shares.start(sequence.request.tenant, num_tokens, self.waiting.now)
        if sequence.num_computed:
            self.costs.note_restart(hit_len, self._num_shareable(sequence))
            sequence.num_computed = 0
