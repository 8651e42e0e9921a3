"""Generation: one request under way, from the loop's tokens to the chunks that its client gets.

Owns when a continuation ends (length, end-of-sequence, stop ids, stop strings), the request's counts, and that the stream gets
its end exactly once. Knows no wire: chunks and a refusal are handed to `send`.

Most tokens are plain: they neither end their continuation nor bring more than themselves. Where a front makes text of them,
they go into the request's slot of UnreadTokens, from which the front's reader takes them.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import structlog

from ..values.errors import EngineError, InvalidField, RequestFailed, RequestMoved
from ..values.output_chunk import OutputChunk, Send, TokenLogprobs, Usage
from ..values.request import NO_SLOT, FinishReason, Int32Array, Request, RequestState
from ..values.sampling_params import LIKELIEST, Branch, Candidates, SamplingParams, SamplingRow, SearchRow
from ..values.token_rules import TokenRules
from .beam_search import BeamSearch, Finished
from .best_of import BestOf
from .model_text import StopRules, TextOutput
from .unread_tokens import Reader, UnreadSlot, UnreadTokens

if TYPE_CHECKING:
    from .constraint import Constraint  # its library loads where requests are constrained

log = structlog.get_logger()


class Timer(Protocol):
    """The timer that ends a request that takes too long."""

    def cancel(self) -> None: ...


@dataclass(slots=True, eq=False)
class Generation:
    """One request under way. Raises nothing: an error ends the request."""

    request: Request
    params: SamplingParams
    seed: int  # 64 bits
    stop: StopRules
    outputs: list[TextOutput]  # one per continuation
    send: Send
    on_close: Callable[["Generation"], None] = lambda generation: None
    num_logprobs: int | None = None  # likeliest tokens returned beside each one drawn; None: no log probabilities are
    constraints: Sequence["Constraint"] = ()  # one per continuation, or none at all
    rules: TokenRules | None = None  # what else is said of single tokens
    search: BeamSearch | None = None  # finds the continuations instead of drawing them; one of `outputs` for each list returned
    best_of: BestOf | None = None  # chooses the continuations that are returned; None: all are, as they come
    session_id: str = ""  # conversation that it belongs to, as its client calls it
    metadata: Mapping[str, str] = field(default_factory=dict)  # the client's own; returned to it, never logged
    started_at: float = field(default_factory=time.monotonic)
    timer: Timer | None = None  # of its time-out
    first_token_at: float | None = None
    last_token_at: dict[int, float] = field(default_factory=dict)  # by continuation
    refusal: EngineError | None = None
    _ended: dict[int, FinishReason] = field(default_factory=dict)
    _num_taken: Counter[int] = field(default_factory=Counter)  # tokens by continuation
    _num_sent: int = 0
    _logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by continuation, of all tokens taken
    _prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    _has_sent_prompt: bool = False
    _undelivered: list[OutputChunk | EngineError] = field(default_factory=list)
    plain_params: SamplingParams | None = field(init=False)  # its draws depend on these, and nothing else is returned of them
    _slot: UnreadSlot | None = None  # of plain tokens of the only continuation, behind the chunks
    _is_read: bool = False  # a reader takes what is in the slot

    def __post_init__(self) -> None:
        needs_logprobs = self.num_logprobs is not None or self.best_of is not None
        is_plain = not (needs_logprobs or self.constraints or self.rules) and self.search is None
        self.plain_params = self.params if is_plain else None
        self.request.is_constrained = bool(self.constraints)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_open(self) -> bool:
        return self.refusal is None and len(self._ended) < self.request.n

    @property
    def num_taken(self) -> int:
        """New tokens of all continuations, or of all lists of a search."""
        return self._num_taken.total() + self._num_plain if self.search is None else self.search.num_tokens

    @property
    def _num_plain(self) -> int:
        """Plain tokens that came by the slot."""
        return 0 if self._slot is None else self._slot.num_added

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """The finish reasons of the continuations that have ended, by index."""
        return [reason for _, reason in sorted(self._ended.items())]

    @property
    def finish_reason(self) -> FinishReason:
        """Why the request ended: the finish reason of its last continuation."""
        if self.refusal is not None:
            return FinishReason.__members__.get(self.refusal.reason, FinishReason.ERROR)
        return next(reversed(self._ended.values()))

    @property
    def num_returned(self) -> int:
        """The number of continuations that the client gets."""
        return self.request.n if self.best_of is None else self.best_of.num_returned

    @property
    def sends_all_at_the_end(self) -> bool:
        """Whether nothing of it is sent before its last token: started over, its client notices nothing."""
        return self.best_of is not None or self.search is not None

    @property
    def has_moved(self) -> bool:
        """Whether another engine continues with it."""
        return isinstance(self.refusal, RequestMoved)

    @property
    def has_failed(self) -> bool:
        """Whether its last computed K and V may be wrong, so that they must not be shared."""
        return isinstance(self.refusal, RequestFailed)

    @property
    def state(self) -> RequestState:
        if self.is_open:
            return self.request.state
        if self.refusal is not None:
            return RequestState.FAILED
        cancelled = FinishReason.CANCELLED in self._ended.values()
        return RequestState.CANCELLED if cancelled else RequestState.COMPLETED

    def sampling_row(self, index: int, token_ids: Int32Array, awaited_row: int | None = None) -> SamplingRow:
        """How the next token of a continuation that holds token_ids, and the one that is awaited, is drawn."""
        if self.plain_params is not None and self.plain_params.is_likeliest:
            return LIKELIEST
        constraint = self.constraints[index] if self.constraints else None
        num_logprobs = 0 if self.num_logprobs is None and self.best_of is not None else self.num_logprobs
        own = (self.params, self.seed, index, token_ids, len(self.request.prompt))
        return SamplingRow(*own, num_logprobs, constraint, awaited_row, self.rules)

    def fail_stuck(self, index: int) -> None:
        """Nothing may be drawn for a continuation."""
        if self.rules is not None and not (self.constraints and self.constraints[index].is_too_complex):
            self.fail(InvalidField("sampling: no token is left that may be drawn", field="sampling"))
        else:
            self.fail(self.constraints[index].refusal() if self.constraints else RequestFailed("no token is allowed"))

    def search_row(self, token_ids: Int32Array) -> SearchRow:
        """How the next tokens of a list that holds token_ids are found."""
        assert self.search is not None
        row = SamplingRow(self.params, self.seed, 0, token_ids, len(self.request.prompt), rules=self.rules)
        return SearchRow(row, self.search.num_candidates)

    def take_candidates(self, slot: int, candidates: Candidates) -> list[Branch] | None:
        """The candidates of one of the search's lists, see BeamSearch. When the search is over, the client gets all at once."""
        assert self.search is not None
        try:
            branches = self.search.take_candidates(slot, candidates)
            self._num_sent = self.search.num_tokens
            if branches is not None and not branches:
                found = self.search.best()
                if len(found) < self.request.n:  # else it ends when as many have finished
                    self.fail_stuck(0)
                    return None
                for index, finished in enumerate(found):
                    self._finish(self._found(index, finished))
            return branches
        except Exception:
            log.exception("text_failed", request_id=self.request.request_id)
            self.fail(RequestFailed("the tokens could not be turned into text"))
            return None

    def _found(self, index: int, finished: Finished) -> OutputChunk:
        """The chunk of a list that has ended."""
        output, token_ids = self.outputs[index], finished.tokens.token_ids()
        if self.stop.reason(token_ids[-1]) is not None:
            del token_ids[-1]
        texts, is_stopped = [], False
        for token_id in token_ids:
            text, is_stopped = output.push(token_id)
            texts.append(text)
        texts += [] if is_stopped else [output.flush()]
        return OutputChunk(index, "".join(texts), tuple(token_ids), finished.reason, cumulative_logprob=finished.tokens.logprob)

    def take_prompt_logprobs(self, first_position: int, found: list[TokenLogprobs]) -> None:
        """Log probabilities of prompt tokens from first_position on. Repeats after a preemption are ignored."""
        self._prompt_logprobs.extend(found[len(self._prompt_logprobs) + 1 - first_position :])

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """Log probabilities of the prompt's tokens from the second on, as far as they are known."""
        return self._prompt_logprobs

    def get_logprobs(self, index: int) -> Sequence[TokenLogprobs]:
        """Log probabilities of a continuation's tokens so far, also of one that ended it; empty where they are not returned."""
        return self._logprobs.get(index, ())

    def count_taken(self, index: int) -> int:
        """The tokens of a continuation so far, also one that ended it."""
        return self._num_taken[index] + self._num_plain  # these are of the only one

    def take_slot(self, unread: UnreadTokens) -> None:
        """A slot for plain tokens, until give_back_slot. None where there are no such tokens."""
        if self.request.n == 1 and self.search is None:
            self._slot = unread.give(self.stop.ids, self.last_token_at.get(0, 0.0))
            self.request.slot = self._slot.at

    def give_back_slot(self, unread: UnreadTokens) -> None:
        """It has ended, and nothing is drawn for it any more."""
        if self._slot is not None:
            assert not self._slot.num_unread, "they were sent before its end"
            self._count_plain()
            unread.take_back(self._slot)
            self._slot, self.request.slot = None, NO_SLOT

    def last_token_time(self, index: int) -> float | None:
        """When a continuation's last token came; None: it has none."""
        noted = self.last_token_at.get(index)
        return noted if noted is None or self._slot is None else self._slot.last_at

    def note_token_time(self, index: int, now: float) -> None:
        """A continuation got a token now."""
        self.last_token_at[index] = now
        if self._slot is not None:
            self._slot.note_time(now)

    def let_read(self, reader: Reader, number: int) -> None:
        """Have a reader take its plain tokens, which knows it by the number. Where text is made here, each token is a chunk."""
        if self._slot is not None and not self.outputs[0].has_text:
            self._slot.join(reader, number)
            self._is_read = True

    def take_plain(self, token_id: int) -> bool:
        """Add the only continuation's next token, if it is a plain one. False: take_token is to add it.

        Behind a chunk that is not sent yet none is plain, because the reader may take the slot's before the chunk is sent.
        """
        return self._slot is not None and not self._undelivered and self._slot.put(token_id)

    def _count_plain(self) -> None:
        """Count the plain tokens with the others."""
        if self._slot is not None and (count := self._slot.take_num_added()):
            self._num_taken[0] += count
            self._num_sent += count

    def _settle(self) -> None:
        """Make the plain tokens a chunk to deliver, because something else follows."""
        self._count_plain()
        if self._slot is not None and (token_ids := self._slot.take()):
            self._put(OutputChunk(0, "", tuple(token_ids)))

    def _note_plain_room(self) -> None:
        """A token was taken that did not end the request: what may follow as plain tokens."""
        brings_more = self.num_logprobs is not None or self.request.num_prompt_logprobs is not None or self.constraints
        if self._slot is not None and self._is_read and not brings_more and self.best_of is None:
            self._slot.open(self.request.max_new_tokens - self.count_taken(0) - 1)

    def take_token(self, index: int, token_id: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Add a continuation's next token. Whether it is the last. The chunk is sent by deliver."""
        try:
            return self._take_token(index, token_id, () if logprobs is None else (logprobs,))
        except Exception:
            log.exception("text_failed", request_id=self.request.request_id)
            self.fail(RequestFailed("the tokens could not be turned into text"))
            return False  # its sequences end with the request

    def _take_token(self, index: int, token_id: int, logprobs: tuple[TokenLogprobs, ...]) -> bool:
        self._settle()
        if not self.is_open or index in self._ended:  # its text was made elsewhere, and met a stop string
            return False
        output = self.outputs[index]
        self._num_taken[index] += 1
        if self.num_logprobs is not None and self.best_of is None:
            self._logprobs.setdefault(index, []).extend(logprobs)
        if self.best_of is not None:
            self.best_of.count(index, logprobs[0].logprob)
            logprobs = logprobs if self.num_logprobs is not None else ()
        if (reason := self.stop.reason(token_id)) is not None:
            return self._finish(OutputChunk(index, output.flush(), (), reason))
        self._num_sent += 1
        text, is_stopped = output.push(token_id)
        if is_stopped:
            return self._finish(OutputChunk(index, text, (token_id,), FinishReason.STOP, logprobs=logprobs))
        if self.constraints:
            self.constraints[index].take_token(token_id)
            if self.constraints[index].is_complete:
                return self._finish(
                    OutputChunk(index, text + output.flush(), (token_id,), FinishReason.STOP, logprobs=logprobs)
                )
        if self._num_taken[index] == self.request.max_new_tokens:
            return self._finish(OutputChunk(index, text + output.flush(), (token_id,), FinishReason.LENGTH, logprobs=logprobs))
        chunk = OutputChunk(index, text, (token_id,), logprobs=logprobs)
        if self.best_of is not None:
            self.best_of.hold(chunk)
        else:
            self._put(chunk)
        self._note_plain_room()
        return False

    def _put(self, chunk: OutputChunk) -> None:
        """The first chunk of continuation 0 brings the prompt's log probabilities along."""
        if chunk.index == 0 and self._prompt_logprobs and not self._has_sent_prompt:
            self._has_sent_prompt = True
            chunk = replace(chunk, prompt_logprobs=tuple(self._prompt_logprobs))
        self._undelivered.append(chunk)

    def deliver(self) -> None:
        """Send the chunks that were added since the last call."""
        for chunk in self._undelivered:
            self.send(chunk)
        self._undelivered.clear()

    def cancel(self) -> None:
        """End the continuations that are still under way. A request that has ended is left alone."""
        self._end_rest(FinishReason.CANCELLED)

    def cut_short(self, reason: FinishReason, refusal: EngineError) -> None:
        """End the request with its output so far, or with the refusal if there is none. One that has ended is left alone."""
        if not self.num_taken:
            return self.fail(refusal)
        if self.search is not None and self.is_open:
            try:
                found = [self._found(index, best) for index, best in enumerate(self.search.so_far(reason))]
            except Exception:
                log.exception("text_failed", request_id=self.request.request_id)
                return self.fail(RequestFailed("the tokens could not be turned into text"))
            for chunk in found:
                self._finish(chunk)
        self._end_rest(reason)
        return None

    def _end_rest(self, reason: FinishReason) -> None:
        self._settle()
        for index in range(self.request.n):
            if self.is_open and index not in self._ended:
                self._finish(OutputChunk(index, self._rest(index), (), reason))
        self.deliver()

    def _rest(self, index: int) -> str:
        """The text that was held back; empty where that fails, because a cancelled request has to end in any case."""
        try:
            return self.outputs[index].flush()
        except Exception:
            log.exception("text_failed", request_id=self.request.request_id)
            return ""

    def stop_at(self, index: int, num_tokens: int) -> bool:
        """A continuation's text, which is made elsewhere, met a stop string with its first num_tokens tokens: it ends there.

        Tokens behind them count no more. Whether it had not ended yet.
        """
        self._settle()
        if not self.is_open or index in self._ended:
            return False
        self._num_sent -= max(0, self._num_taken[index] - num_tokens)
        self._num_taken[index] = min(self._num_taken[index], num_tokens)
        del self._logprobs.get(index, [])[num_tokens:]
        self._finish(OutputChunk(index, "", (), FinishReason.STOP))
        self.deliver()
        return True

    def fail(self, refusal: EngineError) -> None:
        """End the request with an error. A request that has ended is left alone."""
        self._settle()
        if self.is_open:
            self.refusal = refusal
            self._undelivered.append(refusal)
            self.deliver()
            self._close()

    def _finish(self, chunk: OutputChunk) -> bool:
        assert chunk.finish_reason is not None
        self._ended[chunk.index] = chunk.finish_reason
        last = [chunk]
        if self.best_of is not None:
            self.best_of.hold(chunk)
            last = [] if self.is_open else self.best_of.best()
        if not self.is_open:
            last[-1] = replace(last[-1], usage=self.usage)
        for each in last:
            self._put(each)
        if not self.is_open:
            self._close()
        return True

    def _close(self) -> None:
        if self._slot is not None:
            self._slot.open(0)
        self._logprobs.clear()
        self.on_close(self)

    def summary(self) -> dict[str, object]:
        """Fields of the log line about its end."""
        state = "moved" if self.has_moved else self.state.name.lower()
        fields: dict[str, object] = {"request_id": self.request.request_id, "state": state}
        if self.session_id:
            fields["session_id"] = self.session_id
        if self.refusal is not None:
            fields["reason"] = self.refusal.reason
        fields["finish_reasons"] = [reason.name.lower() for reason in self.finish_reasons]
        if self.first_token_at is not None:
            fields["first_token_seconds"] = round(self.first_token_at - self.started_at, 6)
        return {**fields, **self.usage.by_name(), "seconds": round(time.monotonic() - self.started_at, 6)}

    @property
    def usage(self) -> Usage:
        """So far."""
        request = self.request
        return Usage(
            prompt_tokens=len(request.prompt),
            cached_tokens=request.num_hit_tokens or 0,
            new_tokens=self._num_sent + self._num_plain,
            copied_blocks=request.num_copied_blocks,
            num_preemptions=request.num_preemptions,
        )
