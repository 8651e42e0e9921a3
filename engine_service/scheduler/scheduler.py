"""Scheduler: which tokens of which sequences a step computes.

One counter chases the other: a running sequence computes tokens [num_computed, num_tokens), in chunks while that is a
prompt, one while it decodes, and again from the start after a preemption; there are no phases. Continuations of one
prompt wait unforked, get their first tokens from the prompt's logits, and are forked once the prompt is committed.

planner.py plans a step, apply_answer.py takes the cache service's answer over; here are arrivals, ends, and the tokens
computed. Pure: values in, values out; no clock, no wire. All calls come from the task that drives the steps.
"""

import numpy as np

from ..speculation.guess_control import num_kept
from ..values.request import Int32Array, Request, Sequence, SequenceState
from .beam_forks import Branching
from .plan import Limits, Work
from .planner import make_rows
from .state.headroom import Headroom


class Scheduler(Branching):
    """Waiting and running sequences of one engine."""

    # -- arrivals and ends

    def add(self, request: Request, now: float) -> None:
        """Queue a request that came now, in seconds of any clock that does not go back.

        Its first sequence must be created in the cache service before it can start.
        """
        assert 0 < len(request.prompt) < request.max_len <= self.limits.max_len_of(request.retention)
        request.arrival, self._num_arrivals = self._num_arrivals, self._num_arrivals + 1
        request.arrived_at = self.waiting.now = max(now, self.waiting.now)
        self.waiting.put(request.sequences[0], is_new=True)

    def end(self, sequence: Sequence, *, discard: bool = False) -> None:
        """It will never compute again; the next step gives its blocks back. discard: what is not yet committed is not."""
        if sequence in self.waiting.sequences:
            self.waiting.remove(sequence)
        state, sequence.state = sequence.state, SequenceState.ENDED
        if state in (SequenceState.RUNNING, SequenceState.LEAVING):
            assert sequence.row is not None
            self.running.ended[sequence.row], self.running.swapping[sequence.row] = True, False
            if discard:
                self.running.num_computed[sequence.row] = self.running.num_committed[sequence.row]
                self.running.discarded[sequence.row] = True
        elif state in (SequenceState.WAITING, SequenceState.SWAPPED):
            assert sequence.sequence_id is not None
            self.waiting.releases.append(sequence.sequence_id)
        elif state in (SequenceState.LOADING, SequenceState.RETURNING):
            assert sequence.sequence_id is not None
            del self.loading[sequence.sequence_id]
            self.waiting.releases.append(sequence.sequence_id)
        self._unforked.pop(sequence, None)

    def reset(self, limits: Limits) -> list[Request]:
        """A new session: everything that lives starts again, from the tokens it holds. Answers what can never fit it."""
        for sequence in self.running.at(self.running.order):
            rests = self._rests(sequence)
            self.running.remove(sequence)
            if rests:
                sequence.state = SequenceState.ENDED
            elif sequence.state is not SequenceState.ENDED:
                self.waiting.put(sequence)
            self._leave_children(sequence)
        for sequence in self.loading.values():
            self.waiting.put(sequence)
        self.loading.clear()
        self.waiting.forget_all()
        self.limits, self.running = limits, make_rows(limits)
        self.room = Headroom()
        requests = {sequence.request: None for sequence in self.waiting.sequences}
        for request in requests:
            request.start_number = 0  # of another cache service, perhaps
        fits = {request: request.max_len <= limits.max_len_of(request.retention) for request in requests}
        return [request for request in requests if not fits[request] or request.num_rows > limits.num_rows]

    @property
    def num_waiting(self) -> int:
        return len(self.waiting.sequences)

    @property
    def is_empty(self) -> bool:
        """No sequence is known here, or to be given back."""
        return not (self.waiting.sequences or self.running.by_id or self.waiting.releases or self.loading)

    # -- one step

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
            if self.waiting.shares is not None:
                self.waiting.shares.charge(sequence.request.tenant, len(token_ids))
        for child, token_ids in zip(work.sampled[num_rows:], taken[num_rows:], strict=True):
            child.token_ids = np.append(child.request.prompt, token_ids).astype(np.int32)
            if child.state is not SequenceState.ENDED:  # it may have, while this was computed
                self._unforked[child] = None
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
