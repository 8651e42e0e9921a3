"""Scheduler: which tokens of which sequences a step computes.

num_computed chases num_tokens: a running sequence computes tokens [num_computed, num_tokens). That is a chunk of a prompt, or
one token while the sequence decodes, or everything again after a preemption; there are no phases. Continuations of one prompt
wait unforked, get their first tokens from the prompt's logits, and are forked once the prompt is committed.

The facade of the folder: it holds the parts over one SchedulerState, and takes arrivals, ends and new sessions. One step is:

    schedule    decide: what ended leaves, forks follow their parents, running rows share the budget, decodes before prompts,
                and what is left goes to waiting sequences in their order. Nothing has changed yet.
    find_wait   whether the step before has to be advanced first.
    apply       commit, as the cache service decided, and in its order: commits, releases and forks, reservations, swaps, loads
                and starts. Where blocks are short, one sequence gives its own back. What was granted becomes the batch.
    advance     append the tokens that were drawn.

Pure: values in, values out; no clock, no wire. All calls come from the task that drives the steps.
"""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from ..values.request import HeldTokens, Int32Array, Request, Sequence, SequenceState, TakenBlocks, move_to
from ..values.sampling_params import Branch
from .apply_answer import AnswerApplier
from .drawn_tokens import DrawnTokens
from .forks import BeamForks, Forks
from .headroom import Moved
from .limits import Limits
from .plan import NewTokens, Plan, StepAnswer, StepWait, Work
from .planner import NO_GUESSES, Planner
from .preemption import Preemptor
from .running import RunningSequences
from .scheduler_state import SchedulerState
from .waiting import WaitingSequences

NO_BLOCKS: Mapping[int, TakenBlocks] = MappingProxyType({})


class Scheduler:
    """Waiting and running sequences of one engine."""

    def __init__(self, limits: Limits, waiting: WaitingSequences | None = None, *, runs_ahead: bool = True) -> None:
        """As SchedulerState, with all tenants as one by default."""
        state = self.state = SchedulerState(limits, waiting, runs_ahead=runs_ahead)
        self.forks = Forks(state)
        self.preemptor = Preemptor(state, self.forks)
        self.planner = Planner(state, self.forks)
        self.applier = AnswerApplier(state, self.forks, self.preemptor)
        self.beam_forks = BeamForks(state)
        self.drawn_tokens = DrawnTokens(state)

    def note_step(self, work: Work, seconds: float, moved: Moved) -> None:
        """A step was computed. seconds: of all that the device did for it."""
        num_rows, num_tokens = len(work.rows), work.num_tokens
        self.state.costs.note_step(num_rows, num_tokens, seconds, moved)
        if not num_rows or moved.num_bytes:
            return
        prompts = _count_prompts(work) if num_tokens > num_rows else Counter[str]()
        decode_costs, num_decodes = self.state.decode_costs, num_rows - prompts.total()
        if not prompts:
            decode_costs.note(num_tokens, seconds)
        if num_decodes and (decode_seconds := decode_costs.estimate_seconds(num_decodes)) is not None:
            self.state.prompt_shares.note(seconds, decode_seconds, prompts, num_tokens - num_decodes)

    # -- one step

    def schedule(self, now: float, guesses: Mapping[int, Int32Array] = NO_GUESSES) -> Plan:
        """Plan a step, see Planner. If no sequence could continue, a resting list of a search gives its blocks back first."""
        plan = self.planner.plan(now, guesses)
        if self.beam_forks.stands_still(plan):
            self.preemptor.preempt(self.state.resting()[-1])
            plan = self.planner.plan(now, guesses)
        return plan

    def find_wait(self, plan: Plan, answer: StepAnswer) -> StepWait | None:
        """Why advance has to come before apply; None: this may be applied while the step before is still computed."""
        return self.applier.find_wait(plan, answer)

    def apply(self, plan: Plan, answer: StepAnswer) -> Work:
        """Apply the cache service's decisions. Returns the work that can be computed now."""
        return self.applier.apply(plan, answer)

    def histories(self, work: Work) -> list[Int32Array]:
        """The tokens before each drawn token, see DrawnTokens; views, valid until advance."""
        return self.drawn_tokens.histories(work)

    def advance(self, work: Work, drawn: Int32Array) -> NewTokens:
        """The work is done and drew these tokens. Returns the new tokens of each of work.sampled, see DrawnTokens."""
        return self.drawn_tokens.append(work, drawn)

    def fail(self, work: Work) -> list[Sequence]:
        """The work failed. The sequences that it was for and that have not ended; their requests are to end."""
        return self.drawn_tokens.give_up(work)

    def branch(self, request: Request, branches: list[Branch]) -> None:
        """Continue a search with these lists, all computed to their last tokens; its other lists are dropped."""
        self.beam_forks.branch(request, branches)

    # -- beside the steps

    def add(self, request: Request, now: float, taken: Mapping[int, TakenBlocks] = NO_BLOCKS) -> None:
        """Queue a request that arrives now. now: seconds of any monotone clock.

        Its first sequence must be created in the cache service before it can start. A request that is started over brings
        sequences with tokens of their own. taken: by index, the blocks that come with them; these need no start.
        """
        state = self.state
        assert 0 < len(request.prompt) < request.max_len <= state.limits.get_max_len(request.retention)
        request.arrival, state.num_arrivals = state.num_arrivals, state.num_arrivals + 1
        request.arrived_at = state.waiting.now = max(now, state.waiting.now)
        self.put_back(request, taken)

    def put_back(self, request: Request, taken: Mapping[int, TakenBlocks] = NO_BLOCKS) -> None:
        """Queue a request that was taken out, at its old place; each of its sequences starts with the tokens that it holds.

        taken: as for add.
        """
        for sequence in request.sequences:
            if sequence.index in taken:
                self.state.entering[sequence] = taken[sequence.index]
            elif sequence.state is SequenceState.NEW:
                self.state.waiting.put(sequence, is_new=not sequence.num_output)

    def drop_taken(self, taken: Mapping[int, TakenBlocks]) -> None:
        """Release blocks that were taken for a request which does not go on here."""
        self.state.waiting.num_known += len(taken)
        self.state.waiting.releases.extend(blocks.sequence_id for blocks in taken.values())

    def enter(self) -> None:
        """Between two steps: give rows to the sequences that come with blocks, as far as there are any."""
        state = self.state
        running, waiting = state.running, state.waiting
        for sequence, taken in state.entering.items():
            waiting.num_known += 1
            if sequence.state is SequenceState.NEW and running.num_free_rows > self.planner.promised_rows().total():
                sequence.sequence_id = taken.sequence_id
                move_to(sequence, SequenceState.RUNNING)
                running.add(sequence, taken.num_computed, taken.num_tokens, taken.num_reserved, taken.table)
                continue
            waiting.releases.append(taken.sequence_id)
            if sequence.state is SequenceState.NEW:
                waiting.put(sequence, is_new=not sequence.num_output)
        state.entering.clear()

    def take_out(self, request: Request, *, keeps_blocks: bool = False) -> list[Sequence]:
        """Take a request out of the queue and of the steps, with the tokens that it has; what is computed now is dropped.

        The next step commits what was computed, and releases it. keeps_blocks: but for running sequences, until let_go; not in
        a pool with states, which no other session takes. Returns these.
        """
        held, kept, running = [], [], self.state.running
        keeps_blocks = keeps_blocks and not request.unforked and not self.state.limits.has_states
        for sequence in request.sequences:
            has_ended = sequence.state is SequenceState.ENDED or self.state.rests(sequence)
            held.append(HeldTokens(sequence.index, self.state.get_tokens(sequence).copy(), has_ended))
            if keeps_blocks and sequence.state is SequenceState.RUNNING:
                running.kept[sequence.row] = True
                kept.append(sequence)
            if sequence.state is not SequenceState.ENDED:
                self.end_sequence(sequence)
        request.start_over(held)
        return kept

    def let_go(self, sequence: Sequence, *, is_taken: bool) -> None:
        """A kept sequence is another session's, or else the next step releases it. Nothing where its session has ended."""
        if sequence.row is not None:
            self.state.running.kept[sequence.row] = False
            if is_taken:
                self.state.running.remove(sequence)
                self.state.waiting.num_known -= 1

    def next_to_create(self) -> Sequence | None:
        """The next sequence to create in the cache service, now CREATING; None: none for now."""
        return self.beam_forks.next_to_create()

    def end_sequence(self, sequence: Sequence, *, discard: bool = False) -> None:
        """The sequence computes no more; the next step releases its blocks. discard: do not commit what is uncommitted."""
        running, waiting, loading = self.state.running, self.state.waiting, self.state.loading
        if sequence in waiting.sequences:
            waiting.remove(sequence)
        state = sequence.state
        move_to(sequence, SequenceState.ENDED)
        if state in (SequenceState.RUNNING, SequenceState.LEAVING):
            assert sequence.row is not None
            running.ended[sequence.row], running.swapping[sequence.row] = True, False
            running.discarded[sequence.row] = True
            running.completing[sequence.row] = self.state.limits.takes_partial and not discard
            if discard:
                running.num_computed[sequence.row] = running.num_committed[sequence.row]
        elif state in (SequenceState.WAITING, SequenceState.SWAPPED):
            assert sequence.sequence_id is not None
            waiting.releases.append(sequence.sequence_id)
        elif state in (SequenceState.LOADING, SequenceState.RETURNING):
            assert sequence.sequence_id is not None
            del loading[sequence.sequence_id]
            waiting.releases.append(sequence.sequence_id)
        self.state.unforked.pop(sequence, None)

    def give_up_loads(self) -> None:
        """A transfer failed: sequences that were being swapped in are computed again."""
        self.preemptor.give_up_loads()

    def reset(self, limits: Limits) -> list[Request]:
        """A new session: every live sequence starts again with its tokens. Returns the requests that can never fit the pool."""
        state = self.state
        running, waiting = state.running, state.waiting
        for sequence in running.at(running.order):
            rests = state.rests(sequence)
            running.remove(sequence)
            if sequence.state is not SequenceState.ENDED:
                move_to(sequence, SequenceState.ENDED) if rests else waiting.put(sequence)
            self.forks.start_children_alone(sequence)
        for sequence in state.loading.values():
            waiting.put(sequence)
        state.loading.clear()
        for sequence in state.entering:
            if sequence.state is SequenceState.NEW:
                waiting.put(sequence, is_new=not sequence.num_output)
        state.entering.clear()
        waiting.forget_session()
        state.start_session(limits)
        requests = {sequence.request: None for sequence in waiting.sequences}
        for request in requests:
            request.start_number = 0  # it may be another cache service's
        fits = {request: request.max_len <= limits.get_max_len(request.retention) for request in requests}
        return [request for request in requests if not fits[request] or request.num_rows > limits.num_rows]

    # -- what is known

    @property
    def limits(self) -> Limits:
        return self.state.limits

    @property
    def running(self) -> RunningSequences:
        return self.state.running

    @property
    def waiting(self) -> WaitingSequences:
        return self.state.waiting

    @property
    def num_waiting(self) -> int:
        return len(self.state.waiting.sequences)

    @property
    def is_empty(self) -> bool:
        """No sequence is known here, and none has to be released."""
        state = self.state
        queued = state.waiting.sequences or state.waiting.releases or state.entering
        return not (queued or state.running.by_id or state.loading)

    def get_tokens(self, sequence: Sequence) -> Int32Array:
        """Prompt and output so far; a view, valid until the sequence gets another token."""
        return self.state.get_tokens(sequence)


def _count_prompts(work: Work) -> Counter[str]:
    """For each client, the number of sequences whose prompt tokens the step computes."""
    contexts = zip(work.sequences, work.num_context.tolist(), strict=True)
    return Counter(sequence.request.client for sequence, num_context in contexts if num_context < len(sequence.request.prompt))
