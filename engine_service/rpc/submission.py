"""Submission: one request that outlives its client's connection, with everything it has given so far.

Owns the output of each continuation, chunk by chunk, so that a client can read on from any chunk that it has. Text runs behind
tokens, so a place in the output is a number of chunks, never a number of characters. Knows no wire.
"""

import asyncio
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..outputs.generation import Generation
from ..values.errors import EngineError, InvalidField
from ..values.output_chunk import OutputChunk, TokenLogprobs, Usage
from ..values.request import FinishReason
from .stream_pace import HasUnread, StreamPace

EACH_BYTES = 4096  # counted for a submission beside its results
_CHAR_BYTES, _LOGPROB_BYTES = 2, 100  # about, as Python keeps them


@dataclass(slots=True)
class Output:
    """What one continuation has given so far."""

    texts: list[str] = field(default_factory=list)  # of each chunk; after close one text
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the first chunk
    finish_reason: FinishReason | None = None
    cumulative_logprob: float | None = None
    _token_ends: "array[int]" = field(default_factory=lambda: array("i"))  # of each chunk
    _text_ends: "array[int]" = field(default_factory=lambda: array("i"))
    _is_closed: bool = False

    def add(self, chunk: OutputChunk) -> None:
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.prompt_logprobs.extend(chunk.prompt_logprobs)
        self.finish_reason, self.cumulative_logprob = chunk.finish_reason, chunk.cumulative_logprob
        self._token_ends.append(len(self.token_ids))
        self._text_ends.append(len(chunk.text) + (self._text_ends[-1] if self._text_ends else 0))

    @property
    def num_chunks(self) -> int:
        return len(self._token_ends)

    def count_chunks(self, num_tokens: int) -> int | None:
        """The number of leading chunks that hold so many tokens, without the end; None: no chunk ends there."""
        if not num_tokens:
            return 0
        place = bisect_left(self._token_ends, num_tokens)  # a chunk without tokens can only be behind it: it is the last
        return place + 1 if place < self.num_chunks and self._token_ends[place] == num_tokens else None

    def since(self, index: int, num_chunks: int) -> OutputChunk:
        """Everything behind so many chunks, as one chunk of continuation `index`."""
        first_token, first_char = (self._token_ends[num_chunks - 1], self._text_ends[num_chunks - 1]) if num_chunks else (0, 0)
        return OutputChunk(
            index,
            self.texts[0][first_char:] if self._is_closed else "".join(self.texts[num_chunks:]),
            tuple(self.token_ids[first_token:]),
            self.finish_reason,
            logprobs=tuple(self.logprobs[first_token:]),
            prompt_logprobs=() if num_chunks else tuple(self.prompt_logprobs),
            cumulative_logprob=self.cumulative_logprob,
        )

    def close(self) -> int:
        """Nothing more comes. About how many bytes it takes from now on."""
        self.texts, self._is_closed = ["".join(self.texts)], True
        num_logprobs = sum(1 + len(one.top_token_ids) for group in (self.logprobs, self.prompt_logprobs) for one in group)
        arrays = (self.token_ids, self._token_ends, self._text_ends)
        num_bytes = sum(len(one) * one.itemsize for one in arrays)
        return len(self.texts[0]) * _CHAR_BYTES + num_bytes + num_logprobs * _LOGPROB_BYTES


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
    fetched: asyncio.Event = field(default_factory=asyncio.Event)  # its results are fetched whole, forgotten, or not wanted
    on_end: Callable[["Submission"], None] = lambda submission: None
    readers: set[HasUnread] = field(default_factory=set)  # each is notified when there is more
    has_client: bool = True  # it need not wait for one: it was submitted, or its client has come
    is_stream: bool = False  # taken over from a Generate call: it ends with its client
    ended_at: float = 0.0
    num_bytes: int = 0  # once it has ended

    def add_output(self, chunk: OutputChunk | EngineError) -> None:
        """What the loop hands over: the next chunk, or the error that ends the request."""
        if isinstance(chunk, EngineError):
            self.error = chunk
            self._end()
        else:
            self.outputs.setdefault(chunk.index, Output()).add(chunk)
            if chunk.finish_reason is FinishReason.CANCELLED:
                self.fetched.set()  # a client that cancels need not come for the rest
            if chunk.usage is not None:
                self.usage = chunk.usage
                self._end()
        for reader in self.readers:
            reader.notify(at_once=self.ended.is_set())

    def wait_for_client(self, seconds: float) -> None:
        """The request is a stream whose client has to find it here first; it is cancelled when that takes too long."""
        self.is_stream, self.has_client = True, False
        asyncio.get_running_loop().call_later(seconds, self._give_up_client)

    def _give_up_client(self) -> None:
        if not self.has_client and self.generation is not None:
            self.generation.cancel()

    def add_reader(self, has_more: HasUnread) -> None:
        self.has_client = True
        self.readers.add(has_more)

    def drop_reader(self, has_more: HasUnread) -> None:
        self.readers.discard(has_more)
        if self.is_stream and not self.readers and self.generation is not None:
            self.generation.cancel()

    def _end(self) -> None:
        self.ended_at = time.monotonic()
        self.num_bytes = EACH_BYTES + sum(output.close() for output in self.outputs.values())
        if self.generation is not None:
            self.num_bytes += self.generation.request.prompt.nbytes
            self.generation.constraints, self.generation.rules = (), None  # it draws no more tokens, and these take memory
        self.ended.set()
        self.on_end(self)


@dataclass(frozen=True, slots=True)
class Received:
    """How much of a continuation a client has: tokens, and whether its end."""

    index: int
    num_tokens: int
    has_ended: bool


class SubmissionReader:
    """Reads one submission from where its client has it to its end. Use it as a context."""

    def __init__(self, submission: Submission, received: list[Received], pace: StreamPace) -> None:
        """Raises InvalidField where the client cannot have what it says."""
        self._submission = submission
        self._has_more = HasUnread(pace)
        self._has_more.notify(at_once=True)
        self._num_read: dict[int, int] = {}  # chunks by continuation
        for place, one in enumerate(received):
            output = submission.outputs.get(one.index, Output())
            known = output.num_chunks if one.has_ended and output.finish_reason else output.count_chunks(one.num_tokens)
            if known is None or (one.has_ended and (output.finish_reason is None or one.num_tokens != len(output.token_ids))):
                field = f"received[{place}].{'has_ended' if one.has_ended else 'num_tokens'}"
                raise InvalidField(f"{field}: the request has sent no such part of this continuation", field=field)
            self._num_read[one.index] = known

    def __enter__(self) -> "SubmissionReader":
        self._submission.add_reader(self._has_more)
        return self

    def __exit__(self, *_: object) -> None:
        self._submission.drop_reader(self._has_more)

    async def take_unread(self) -> tuple[list[OutputChunk], EngineError | None]:
        """What is new, one chunk for each continuation; the last chunk of the request has its usage. Then its error."""
        await self._has_more.wait()
        submission, chunks = self._submission, []
        for index, output in sorted(submission.outputs.items()):
            if (num_read := self._num_read.get(index, 0)) < output.num_chunks:
                chunks.append(output.since(index, num_read))
                self._num_read[index] = output.num_chunks
        if submission.usage is not None:
            last = chunks.pop() if chunks else OutputChunk(0, "", ())
            chunks.append(replace(last, usage=submission.usage))
        return chunks, submission.error
