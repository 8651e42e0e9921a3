"""What comes of a request for text: one JSON object, or a stream of events. The same writer makes the choices of both.

A whole answer is the stream's parts put together before they are written. A request has one prompt or several; choices are
numbered through. Nothing is sent before the engine's first part, so that what it refuses has its status.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json

from kvkeeper.client import KvkeeperError, OutputChunk, Usage
from kvkeeper.http.asking import EngineRequest
from kvkeeper.http.engines import Engine
from kvkeeper.http.errors import HttpError, refused
from kvkeeper.http.fields import Generating
from kvkeeper.http.tokens import Pieces, shown_ids

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"  # ends a stream
_END = b"}\n\n"  # of an event
_BROKEN = {
    "cancelled": (503, "the request was cancelled"),
    "error": (500, "the request failed"),
    "timed_out": (504, "the request took too long"),
    "stalled": (504, "the request made no progress"),
}


Placed = tuple[int, OutputChunk | Usage]  # of the prompt of this place


class Answer(Protocol):
    """What a client gets for a request for text: one JSON object, or a stream of events. Both raise HttpError."""

    @property
    def is_streamed(self) -> bool: ...

    def events(self) -> AsyncGenerator[bytes, None]: ...

    async def whole(self) -> Mapping[str, Any]: ...


class Writer(Protocol):
    """Makes choices of one kind of answer. kind: what its JSON calls it; part_kind: and a part of a stream."""

    kind: str
    part_kind: str

    def part(self, place: int, chunk: OutputChunk, pieces: Pieces) -> dict[str, Any] | None:
        """The choice in an event of a stream, without its index; None: there is nothing new. place: of the prompt."""

    def whole(self, place: int, chunk: OutputChunk, pieces: Pieces) -> dict[str, Any]:
        """The choice of an answer, which has all of it in one chunk."""

    def further(self, pieces: Pieces) -> dict[str, Any]:
        """Fields of the answer beside its choices."""

    async def usage_details(self, engine: Engine) -> dict[str, Any]:
        """Further counts of tokens, of all that was written. Raises KvkeeperError."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request on its way. id: of the answer."""

    id: str
    engine: Engine
    asked: Sequence[EngineRequest]
    request: Generating
    writer: Writer
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, kind: str) -> dict[str, Any]:
        model = self.engine.model
        return {"id": self.id, "object": kind, "created": self.created, "model": model.model_id,
                "system_fingerprint": f"fp_{model.revision[:12]}"}  # fmt: skip

    @property
    def is_streamed(self) -> bool:
        return bool(self.request.stream)

    def events(self) -> AsyncGenerator[bytes, None]:
        return stream(self)

    async def whole(self) -> Mapping[str, Any]:
        return await whole(self)

    def index(self, place: int, chunk: OutputChunk) -> int:
        return place * (self.request.n or 1) + chunk.index

    async def spell(self, chunk: OutputChunk) -> Pieces:
        """What its log probabilities need, and all that was spelled before. Raises HttpError."""
        if not (chunk.logprobs or chunk.prompt_logprobs):
            return self.engine.spelled
        return await self.wait_for(self.engine.spell(shown_ids((*chunk.logprobs, *chunk.prompt_logprobs))))

    async def wait_for(self, further: Awaitable[T]) -> T:
        """The result of what the answer needs beside the stream. Raises HttpError for a KvkeeperError."""
        try:
            return await further
        except KvkeeperError as error:
            raise self.asked[0].failure(error) from None


def check_streaming(request: Generating) -> None:
    """Raises HttpError for what goes with a stream alone, and for what does not."""
    if request.stream_options is not None and not request.stream:
        raise refused("stream_options", "of a stream alone")
    if request.stream and request.prompt_logprobs is not None:
        raise refused("prompt_logprobs", "not in a stream")


async def whole(work: Work) -> dict[str, Any]:
    """The answer of a request that is not streamed. Raises HttpError."""
    parts: dict[tuple[int, int], list[OutputChunk]] = defaultdict(list)
    usages = []
    async with aclosing(read_chunks(work)) as found:
        async for place, chunk in found:
            if isinstance(chunk, Usage):
                usages.append(chunk)
            else:
                parts[place, chunk.index].append(chunk)
    pieces: Pieces = {}
    choices = []
    for (place, _), chunks in sorted(parts.items()):
        chunk = merged(chunks)
        pieces = await work.spell(chunk)
        choices.append({"index": work.index(place, chunk), **work.writer.whole(place, chunk, pieces)})
    usage = await _usage(work, usages)
    return {**work.envelope(work.writer.kind), "choices": choices, "usage": usage, **work.writer.further(pieces)}


def merged(chunks: Sequence[OutputChunk]) -> OutputChunk:
    return OutputChunk(
        chunks[0].index,
        "".join(chunk.text for chunk in chunks),
        tuple(token for chunk in chunks for token in chunk.token_ids),
        chunks[-1].finish_reason,
        tuple(each for chunk in chunks for each in chunk.logprobs),
        tuple(each for chunk in chunks for each in chunk.prompt_logprobs),
    )


async def stream(work: Work) -> AsyncGenerator[bytes, None]:
    """The events of a request that is streamed. Raises HttpError."""
    options = work.request.stream_options
    with_usage = options is not None and bool(options.include_usage)
    envelope = work.envelope(work.writer.part_kind) | ({"usage": None} if with_usage else {})
    usages = []
    counts_on, num_new = work.request.counts_on, Counter[int]()  # tokens of each choice
    head = event(envelope)[: -len(_END)]
    async with aclosing(read_chunks(work)) as found:
        async for place, chunk in found:
            if isinstance(chunk, Usage):
                usages.append(chunk)
                continue
            index = work.index(place, chunk)
            if counts_on:
                num_new[index] += len(chunk.token_ids)
                envelope["usage"] = _counts(work, len(work.asked[place].ids or ()), num_new[index])
                head = event(envelope)[: -len(_END)]
            part = work.writer.part(place, chunk, await work.spell(chunk))
            if part is not None:
                yield b'%b,"choices":[%b]%b' % (head, to_json({"index": index, **part}), _END)
    yield (event(envelope | {"choices": [], "usage": await _usage(work, usages)}) if with_usage else b"") + DONE


def event(value: Mapping[str, Any]) -> bytes:
    """As a server-sent event, which has a name where the value has a type."""
    name = b"event: %s\n" % value["type"].encode() if "type" in value else b""
    return name + b"data: " + to_json(value)[:-1] + _END


async def _usage(work: Work, usages: Sequence[Usage]) -> dict[str, Any]:
    """Raises HttpError."""
    counts = _counts(work, sum(usage.prompt_tokens for usage in usages), sum(usage.new_tokens for usage in usages))
    details = await work.wait_for(work.writer.usage_details(work.engine))
    return counts | {"prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)}} | details


def _counts(work: Work, num_prompt: int, num_new: int) -> dict[str, Any]:
    num_new = 0 if work.request.max_tokens == 0 else num_new
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def read_chunks(work: Work) -> AsyncGenerator[Placed, None]:
    """What comes of each prompt, by its place. Raises HttpError."""
    return _read_one(work, 0) if len(work.asked) == 1 else _read_all(work)


async def _read_all(work: Work) -> AsyncGenerator[Placed, None]:
    queue: asyncio.Queue[tuple[int, OutputChunk | Usage | HttpError]] = asyncio.Queue(len(work.asked))
    reading = [asyncio.create_task(_fill(work, place, queue)) for place in range(len(work.asked))]
    num_left = len(reading)
    try:
        while num_left:
            place, found_one = await queue.get()
            if isinstance(found_one, HttpError):
                raise found_one
            num_left -= isinstance(found_one, Usage)
            yield place, found_one
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _fill(work: Work, place: int, queue: "asyncio.Queue[tuple[int, OutputChunk | Usage | HttpError]]") -> None:
    try:
        async with aclosing(_read_one(work, place)) as found:
            async for each in found:
                await queue.put(each)
    except HttpError as error:
        await queue.put((place, error))


async def _read_one(work: Work, place: int) -> AsyncGenerator[Placed, None]:
    asked = work.asked[place]
    async with asked.start(work.engine) as generation:
        try:
            async for chunk in generation:
                if chunk.finish_reason in _BROKEN:
                    raise HttpError(*_BROKEN[chunk.finish_reason])
                yield place, chunk
        except KvkeeperError as error:
            raise asked.failure(error) from None
        assert generation.usage is not None, "a stream that ended without an error has its usage"
        yield place, generation.usage
