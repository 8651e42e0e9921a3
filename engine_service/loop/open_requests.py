"""OpenRequests: the requests under way, from submit to the last chunk that their clients get.

Owns which requests are open, and which chunks their streams do not have yet. Hands the scheduler their sequences, and turns
what a step has computed into tokens, ends and failures, each of one request alone. Called from the loop's task and, between its
turns, by the tasks that submit and cancel; knows neither the session nor the worker thread.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import structlog

from ..compute.sampler import SampledTokens
from ..compute.step_compute import Computed, StepRows
from ..outputs.generation import Generation
from ..outputs.unread_tokens import Histories, SlotDraws, UnreadTokens
from ..scheduler.limits import Limits
from ..scheduler.plan import NewTokens, Work
from ..scheduler.scheduler import NO_BLOCKS, Scheduler
from ..values.errors import DuplicateRequest, EngineError, NeverFits, QueueFull, RequestFailed, UnknownRequest
from ..values.request import NO_SLOT, Request, Sequence, SequenceState, TakenBlocks
from ..values.sampling_params import Candidates
from .stats import EngineStats
from .tracing import EngineTracing

log = structlog.get_logger()


class OpenRequests:
    """The requests under way, by id and in order of arrival."""

    def __init__(
        self, scheduler: Scheduler, stats: EngineStats, tracing: EngineTracing, max_waiting: int, wake_up: Callable[[], None]
    ) -> None:
        """wake_up: notifies the loop that a request came or ended."""
        self.generations: dict[str, Generation] = {}  # open ones, in order of arrival
        self._scheduler, self._stats, self._tracing = scheduler, stats, tracing
        self._max_waiting, self._wake_up = max_waiting, wake_up
        self._by_request: dict[Request, Generation] = {}  # those with sequences that have not ended
        self._closed: list[Generation] = []
        self._stopped: list[tuple[Request, int]] = []  # continuations that ended outside of a step, of requests that go on
        self._undelivered: dict[Generation, None] = {}  # those with chunks that their streams do not have yet
        self.unread, self._draws = UnreadTokens(), SlotDraws()
        self._num_completed = 0  # when have_got_on was called last
        self._num_taken: dict[str, int] = {}  # tokens of each open one, then

    def submit(self, generation: Generation) -> None:
        """Queue a request, or refuse it; no other task comes between check and queueing."""
        self._check_new(generation.request)
        self._check_room(generation.request.client)
        self._queue(generation)

    def adopt(self, generation: Generation, taken: Mapping[int, TakenBlocks]) -> None:
        """Queue a request that another engine took in, or refuse it if it does not fit here. It may have tokens already.

        taken: by index, the blocks of its continuations that run on.
        """
        self._check_new(generation.request)
        self._stats.num_taken_over_requests += 1
        self._queue(generation, taken)

    def _check_new(self, request: Request) -> None:
        if request.request_id in self.generations:
            raise DuplicateRequest("a live request has this id")
        self._check_fits(request)

    def _check_fits(self, request: Request) -> None:
        max_len = self._scheduler.limits.get_max_len(request.retention)
        if request.max_len > max_len:
            text = f"prompt and max_tokens are {request.max_len} tokens together, and at most {max_len} fit"
            raise NeverFits(with_bound(text, self._scheduler.limits, request), requested=request.max_len, limit=max_len)
        if request.num_rows > (limit := self._scheduler.limits.num_rows):
            text = f"the request has {request.num_rows} beams, and at most {limit} sequences run at once"
            raise NeverFits(text, requested=request.num_rows, limit=limit)

    def _queue(self, generation: Generation, taken: Mapping[int, TakenBlocks] = NO_BLOCKS) -> None:
        request = generation.request
        generation.on_close = self._note_close
        generation.take_slot(self.unread)
        self._draws.set(request.slot, generation.plain_params if request.slot != NO_SLOT else None, generation.seed)
        self.generations[request.request_id] = self._by_request[request] = generation
        self._scheduler.add(request, time.monotonic(), taken)
        self._wake_up()
        self._tracing.begin_request(generation)

    def _check_room(self, client: str) -> None:
        """Raises QueueFull. A client leaves a tenth of the queue to others."""
        num_waiting, limit = self._scheduler.num_waiting + self.num_held, self._max_waiting
        if num_waiting >= limit:
            raise QueueFull(f"{limit} requests are waiting, the most that may", limit=limit, flag="--max-waiting")
        limit -= limit // 10
        if num_waiting >= limit and self._scheduler.waiting.num_of[client] >= limit:
            raise QueueFull(
                f"{limit} of the client's requests are waiting, the most that may", limit=limit, flag="--max-waiting"
            )

    @property
    def num_held(self) -> int:
        """Open requests that are out of the steps."""
        num_closed = sum(generation.request in self._by_request for generation in self._closed)
        return len(self.generations) - len(self._by_request) + num_closed

    def take_out(self, generation: Generation, *, keeps_blocks: bool) -> list[Sequence]:
        """Take an open request out of the steps. It stays open, and computes nothing until put back.

        keeps_blocks: of what runs, so that another session can take it. Returns the sequences that keep theirs.
        """
        del self._by_request[generation.request]
        self._wake_up()
        keeps_blocks = keeps_blocks and not generation.sends_all_at_the_end
        return self._scheduler.take_out(generation.request, keeps_blocks=keeps_blocks)

    def put_back(self, generation: Generation, taken: Mapping[int, TakenBlocks] = NO_BLOCKS) -> None:
        """Continue a request that was taken out, if it is still open, from the tokens that it has.

        taken: by index, blocks of the session that is served on, which its continuations run on with.
        """
        if generation.is_open:
            try:
                self._check_fits(generation.request)  # the session may be another one since
            except NeverFits as error:
                generation.fail(error)
        if generation.is_open:
            self._by_request[generation.request] = generation
            self._scheduler.put_back(generation.request, taken)
        else:
            self._scheduler.drop_taken(taken)
        self._wake_up()

    def cancel(self, request_id: str) -> None:
        """End an open request: its stream ends at once, its blocks are released with the next step."""
        if request_id not in self.generations:
            raise UnknownRequest("no live request has this id")
        self.generations[request_id].cancel()

    def stop_at(self, generation: Generation, index: int, num_tokens: int) -> None:
        """End a continuation whose text, made elsewhere, met a stop string with its first num_tokens tokens."""
        if generation.stop_at(index, num_tokens) and generation.is_open:
            self._stopped.append((generation.request, index))
            self._wake_up()

    def fail_all(self, error: EngineError) -> None:
        """End all open requests. If there is a session, the next step releases their blocks."""
        for generation in list(self.generations.values()):
            generation.fail(error)

    def have_got_on(self) -> bool:
        """Whether one has been completed since the last call, or an open one has more tokens than it had then."""
        num_completed, num_taken = self._num_completed, self._num_taken
        self._num_completed = self._stats.num_completed_requests
        self._num_taken = {each.request_id: each.num_taken for each in self.generations.values()}
        has_more = any(count > num_taken.get(request_id, 0) for request_id, count in self._num_taken.items())
        return has_more or self._num_completed > num_completed

    def rows(self, work: Work) -> StepRows:
        """How each of the step's tokens is drawn, and the tokens of each list that a search extends."""
        by_request = self._by_request
        has_one_each = len(work.sampled) == len(work.sample_rows) and not work.searched
        if has_one_each and len(work.logit_idx) == len(work.sampled):
            running, rows = self._scheduler.running, work.sample_rows
            num_known, num_prompts, serials = running.num_tokens[rows], running.num_prompt[rows], running.serials[rows]
            histories = Histories(running.tokens, rows, num_known, num_prompts, work.awaited, serials)
            plain = self._draws.rows(running.slots[rows], histories)
            if plain is not None:
                return StepRows(plain, [])
        drawing = [sequence for sequence, own in zip(work.sampled, work.guesses, strict=True) for _ in range(len(own) + 1)]
        awaited: list[int | None] = [None] * len(drawing)
        for at in np.flatnonzero(work.awaited).tolist():  # there are no guesses in such a step
            awaited[at] = int(work.sample_rows[at])
        sampled = [
            by_request[sequence.request].sampling_row(sequence.index, tokens, row)
            for sequence, tokens, row in zip(drawing, self._scheduler.histories(work), awaited, strict=True)
        ]
        get_tokens = self._scheduler.get_tokens
        searched = [self._by_request[sequence.request].search_row(get_tokens(sequence)) for sequence in work.searched]
        return StepRows(sampled, searched)

    def progress(self) -> dict[Generation, tuple[int, int]]:
        """For each running request its progress: output tokens, and computed tokens of its running sequences."""
        num_computed, found = self._scheduler.running.num_computed, {}
        for generation in self.generations.values():
            sequences = generation.request.sequences
            rows = [each.row for each in sequences if each.state is SequenceState.RUNNING and each.row is not None]
            if rows:
                found[generation] = (generation.num_taken, int(num_computed[rows].sum()))
        return found

    def may_guess(self, sequence: Sequence) -> bool:
        """Whether tokens may be guessed for the sequence."""
        generation = self._by_request.get(sequence.request)
        return generation is not None and generation.is_open and not generation.constraints and generation.search is None

    def emit(self, work: Work, computed: Computed | None) -> NewTokens:
        """Turn the computed tokens into text for the streams. Returns the new tokens of each of work.sampled."""
        if computed is None:
            for sequence in self._scheduler.fail(work):
                self.fail(sequence.request, RequestFailed("the forward pass failed"))
            return []
        taken = self._scheduler.advance(work, computed.sampled.token_ids.astype(np.int32))
        for score, found in zip(work.scores, computed.prompt_logprobs, strict=True):
            if (generation := self._by_request.get(score.sequence.request)) is not None:
                generation.take_prompt_logprobs(score.first_position, found)
        self._stats.count_step(work, taken)
        self._take_drawn(work, taken, computed)
        for sequence, candidates in zip(work.searched, computed.candidates, strict=True):
            self._take_candidates(sequence, candidates)
        for index in computed.broken:
            self.fail(work.unfinished[index].request, RequestFailed("the logits are not finite"))
        return taken

    def _take_drawn(self, work: Work, taken: NewTokens, computed: Computed) -> None:
        """The next tokens of each sequence. Most are plain, and one apiece: these cost the step no call each."""
        sampled = computed.sampled
        if len(sampled.token_ids) > len(work.sampled):  # with guesses
            row = 0
            for sequence, guesses, own in zip(work.sampled, work.guesses, taken, strict=True):
                self._take_tokens(sequence, own.tolist(), row, computed)
                row += len(guesses) + 1
            return
        rest = self._add_plain(work, taken, sampled)
        for row in rest.tolist():
            self._take_tokens(work.sampled[row], taken[row].tolist(), row, computed)

    def _add_plain(self, work: Work, taken: NewTokens, sampled: SampledTokens) -> npt.NDArray[np.int64]:
        """Add the plain ones of a step's tokens to what is unread. Returns the rows of the others."""
        num_rows = len(work.sample_rows)
        slots = self._scheduler.running.slots[work.sample_rows]
        # A row whose sequence had ended before may be another one's by now.
        if not isinstance(taken, np.ndarray) and not all(map(len, taken)):
            slots[[not len(own) for own in taken[:num_rows]]] = NO_SLOT
        if troubled := [row for row in (*sampled.bad_rows, *sampled.stuck_rows) if row < num_rows]:
            slots[troubled] = NO_SLOT
        added = self.unread.add(slots, sampled.token_ids[:num_rows], time.monotonic())
        self._stats.between_tokens.add(added.gaps)
        others = np.flatnonzero(~added.is_added)
        return others if num_rows == len(work.sampled) else np.append(others, np.arange(num_rows, len(work.sampled)))

    def _take_tokens(self, sequence: Sequence, token_ids: list[int], first_row: int, computed: Computed) -> None:
        """One sequence's next tokens, drawn in the rows from first_row on."""
        generation = self._by_request.get(sequence.request)
        if generation is None:
            return  # it ended while this was computed
        for row, token_id in enumerate(token_ids, first_row):
            if row in computed.sampled.bad_rows:
                generation.fail(RequestFailed("the logits are not finite"))
            elif row in computed.sampled.stuck_rows:
                generation.fail_stuck(sequence.index)
            if not generation.is_open:
                continue
            self._undelivered[generation] = None
            self._stats.time_token(generation, sequence.index)
            if generation.take_plain(token_id):
                continue
            if generation.take_token(sequence.index, token_id, computed.logprobs.get(row)):
                self._scheduler.end_sequence(sequence)
                break

    def _take_candidates(self, sequence: Sequence, candidates: Candidates | None) -> None:
        """The candidates of one list of a search. Once all its lists have candidates, the likeliest go on."""
        generation = self._by_request.get(sequence.request)
        if generation is None or not generation.is_open:
            return None
        if candidates is None:
            return generation.fail(RequestFailed("the logits are not finite"))
        branches = generation.take_candidates(sequence.index, candidates)
        if branches is not None:
            self._undelivered[generation] = None
            self._stats.time_token(generation, 0)
        if branches:
            self._stats.num_new_tokens += len(branches)
            self._scheduler.branch(generation.request, branches)
        return None

    def deliver(self) -> None:
        """Push the emitted chunks to the streams. Their tasks then run beside the next forward pass, not before it."""
        for generation in self._undelivered:
            generation.deliver()
        self._undelivered.clear()
        self.unread.notify_readers()

    def end_closed(self) -> None:
        """End the sequences of requests that ended. The last K and V of a failed request must not be shared."""
        for request, index in self._stopped:
            for sequence in request.sequences:
                if sequence.index == index and sequence.state is not SequenceState.ENDED:
                    self._scheduler.end_sequence(sequence)
        self._stopped.clear()
        for generation in self._closed:
            for sequence in generation.request.sequences:
                if sequence.state is not SequenceState.ENDED:
                    self._scheduler.end_sequence(sequence, discard=generation.has_failed)
            self._by_request.pop(generation.request, None)  # one that was taken out is not there
            generation.give_back_slot(self.unread)
        self._closed.clear()

    def fail(self, request: Request, error: EngineError) -> None:
        """End one request with an error, if it is still open."""
        if (generation := self._by_request.get(request)) is not None:
            generation.fail(error)

    def _note_close(self, generation: Generation) -> None:
        """A request ended, in a step or outside of one."""
        del self.generations[generation.request.request_id]
        if generation.timer is not None:
            generation.timer.cancel()
        self._closed.append(generation)
        self._wake_up()
        self._stats.count_end(generation)
        self._tracing.end_request(generation)
        log.info("request_moved" if generation.has_moved else "request_ended", **generation.summary())


def with_bound(text: str, limits: Limits, request: Request) -> str:
    """The text of an error about too many tokens, with the setting that bounds them."""
    bound = limits.describe_bound(request.retention)
    return f"{text}: {bound}" if bound else text
