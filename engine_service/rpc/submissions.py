"""Submissions: requests that outlive their client's connection, and their results, kept for a bounded time.

Rules: the same id with the same contents is the same request, however often and however close together it comes; the same id
with other contents is refused while the first is remembered. A request that ended is forgotten after `keep_s` seconds; the ones
that ended first go earlier, when more than `max_kept` have ended or their results take more than `max_bytes`. Knows no wire;
the function that admits a request is handed in.
"""

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from ..outputs.generation import Generation
from ..values.errors import DuplicateRequest, EngineError, UnknownRequest
from ..values.output_chunk import OutputChunk, Usage
from ..values.request import FinishReason
from ..values.token_logprobs import TokenLogprobs

_EACH_BYTES = 4096  # counted for a submission beside its results
_CHAR_BYTES, _LOGPROB_BYTES = 2, 100  # about, as Python keeps them

Admit = Callable[[Callable[[OutputChunk | EngineError], None]], Awaitable[Generation]]


@dataclass(slots=True)
class Output:
    """What one continuation has given so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cumulative_logprob: float | None = None

    def close(self) -> int:
        """Nothing more comes. About how many bytes it takes from now on."""
        self.texts = ["".join(self.texts)]
        num_logprobs = sum(1 + len(one.top_token_ids) for told in (self.logprobs, self.prompt_logprobs) for one in told)
        return len(self.texts[0]) * _CHAR_BYTES + len(self.token_ids) * self.token_ids.itemsize + num_logprobs * _LOGPROB_BYTES


@dataclass(slots=True, eq=False)
class Submission:
    """One submitted request. generation is None while it is being admitted."""

    digest: bytes
    admitted: asyncio.Future[None]
    generation: Generation | None = None
    outputs: dict[int, Output] = field(default_factory=dict)
    usage: Usage | None = None
    error: EngineError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    fetched: asyncio.Event = field(default_factory=asyncio.Event)  # its results are fetched whole, or forgotten
    on_end: Callable[["Submission"], None] = lambda submission: None
    ended_at: float = 0.0
    num_bytes: int = 0  # once it has ended

    def add_output(self, chunk: OutputChunk | EngineError) -> None:
        """What the loop hands over: the next chunk, or the error that ends the request."""
        if isinstance(chunk, EngineError):
            self.error = chunk
            return self._end()
        output = self.outputs.setdefault(chunk.index, Output())
        output.texts.append(chunk.text)
        output.token_ids.extend(chunk.token_ids)
        output.logprobs.extend(chunk.logprobs)
        output.prompt_logprobs.extend(chunk.prompt_logprobs)
        output.finish_reason, output.cumulative_logprob = chunk.finish_reason, chunk.cumulative_logprob
        if chunk.usage is not None:
            self.usage = chunk.usage
            self._end()
        return None

    def _end(self) -> None:
        self.ended_at = time.monotonic()
        self.num_bytes = _EACH_BYTES + sum(output.close() for output in self.outputs.values())
        if self.generation is not None:
            self.num_bytes += self.generation.request.prompt.nbytes
            self.generation.constraints = ()  # it draws no more tokens, and grammars take memory
        self.ended.set()
        self.on_end(self)


class Submissions:
    """Submitted requests by id, open and ended, within bounds of number, age and bytes."""

    def __init__(self, max_kept: int, keep_s: float, max_bytes: int) -> None:
        self._max_kept, self._max_bytes = max_kept, max_bytes
        self._keep_s = keep_s
        self._by_id: dict[str, Submission] = {}  # in order of submission
        self._ended: dict[str, Submission] = {}  # of them, in order of their ends
        self._num_ended_bytes = 0

    async def submit(self, request_id: str, digest: bytes, admit: Admit) -> None:
        """Admit the request once. Raises DuplicateRequest, or the error of admit, which leaves nothing behind."""
        self._forget_old()
        known = self._by_id.get(request_id)
        if known is not None:
            if known.digest != digest:
                raise DuplicateRequest("a request with this id was submitted with other contents")
            await asyncio.shield(known.admitted)
            return
        admitted = asyncio.get_running_loop().create_future()
        submission = self._by_id[request_id] = Submission(digest, admitted, on_end=partial(self._note_end, request_id))
        try:
            submission.generation = await admit(submission.add_output)
        except BaseException as error:
            self._forget(request_id)
            submission.admitted.set_exception(
                error if isinstance(error, EngineError) else UnknownRequest("the request was not admitted")
            )
            submission.admitted.exception()  # calls that wait for it get it; that none waits is no fault
            raise
        submission.admitted.set_result(None)

    async def wait(self, request_id: str, seconds: float) -> tuple[Generation, Submission]:
        """The submission when it has ended, or after so many seconds. Raises UnknownRequest."""
        self._forget_old()
        submission = self._by_id.get(request_id)
        if submission is None:
            raise UnknownRequest("no request with this id was submitted, or its results are no longer kept")
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(submission.admitted)
                await submission.ended.wait()
        except TimeoutError:
            pass
        if submission.generation is None:
            raise UnknownRequest("the request is being admitted")
        if submission.ended.is_set():
            submission.fetched.set()
        return submission.generation, submission

    async def wait_fetched(self) -> None:
        """Until all requests that were submitted so far have ended, and their results are fetched or forgotten."""
        for submission in list(self._by_id.values()):
            await submission.fetched.wait()

    @property
    def num_kept(self) -> int:
        """Submitted requests that are known, ended or not."""
        return len(self._by_id)

    def _note_end(self, request_id: str, submission: Submission) -> None:
        if self._by_id.get(request_id) is submission and request_id not in self._ended:
            self._ended[request_id] = submission
            self._num_ended_bytes += submission.num_bytes

    def _forget_old(self) -> None:
        now = time.monotonic()
        while self._ended:
            request_id, first = next(iter(self._ended.items()))
            is_surplus = self._num_ended_bytes > self._max_bytes and len(self._ended) > 1  # the last one is kept in any case
            if not is_surplus and len(self._ended) <= self._max_kept and now - first.ended_at < self._keep_s:
                return
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        submission = self._by_id.pop(request_id)
        if self._ended.pop(request_id, None) is not None:
            self._num_ended_bytes -= submission.num_bytes
        submission.fetched.set()
