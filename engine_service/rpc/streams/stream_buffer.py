"""StreamBuffer: what one stream's client has not read yet, bounded.

The loop puts and never waits; the stream's task takes everything that is there at once. A client that stops reading would
otherwise fill this process with what is generated for it: when too much is unread although the stream's task had its turn, the
unread chunks are dropped and the request is to end. Much that comes at once is no fault. Knows no wire.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ...outputs.plain_reader import PlainReader
from ...values.errors import EngineError, NotRead
from ...values.output_chunk import OutputChunk, PlainTokens, coalesce
from .stream_pace import HasUnread, StreamPace
from .streamed import Streamed

MAX_UNREAD = 1 << 16  # tokens, and log probabilities beside them; about 20 MB


class Tell(Protocol):
    """Says that there is something unread; at_once: it does not wait for a round of writes."""

    def __call__(self, *, at_once: bool) -> None: ...


class StreamBuffer:
    """The unread chunks of one stream, and the error that ends it. To be made and used on the running loop.

    on_full is called once, outside of put, with the error of a client that does not read.
    """

    def __init__(self, tell: Tell, *, merges: bool = True) -> None:
        """merges: whether tokens that come until they are read are read as one."""
        self._merges = merges
        self.on_full: Callable[[EngineError], None] = lambda error: None
        self._tell = tell
        self._take_more: Callable[[], PlainTokens | None] = lambda: None
        self._chunks: list[OutputChunk] = []
        self._num_unread = 0
        self._error: EngineError | None = None
        self._is_checked = False
        self._is_full = False

    def read(self, generation: Streamed, reader: PlainReader | None = None, number: int = 0) -> None:
        """Of a request that was admitted with put: take its plain tokens when they are read, and end it where they are not.

        reader: of many requests, this one under its number, where it can. It is to read behind what take answers.
        """
        self.on_full, self._take_more = generation.fail, generation.take_more
        if self._merges and not (reader is not None and generation.let_read(reader, number)):  # else each is sent
            generation.let_take_more(partial(self._tell, at_once=False))

    def put(self, output: OutputChunk | EngineError) -> None:
        if isinstance(output, EngineError):
            self._error = output
        elif not self._is_full:
            self._chunks.append(output)
            self._num_unread += len(output.token_ids) + sum(1 + len(one.top_token_ids) for one in output.logprobs)
        is_last = isinstance(output, EngineError) or output.usage is not None
        self._tell(at_once=is_last or self._num_unread > MAX_UNREAD)
        if self._num_unread > MAX_UNREAD and not self._is_checked:
            self._is_checked = True
            asyncio.get_running_loop().call_soon(self._check)  # after the stream's task, if that is waiting

    @property
    def has_unread(self) -> bool:
        """Whether there is something that take answers without asking for more."""
        return bool(self._chunks) or self._error is not None

    def take(self) -> tuple[list[OutputChunk], EngineError | None]:
        """Everything that has come, neighbouring chunks joined where they may be, and the error after which nothing comes."""
        more = self._take_more()
        chunks, self._chunks, self._num_unread = self._chunks, [], 0
        if more is not None:
            chunks.append(more.chunk())
        return (coalesce(chunks) if self._merges else chunks), self._error

    def take_plain(self) -> PlainTokens | None:
        """Everything that has come, where that is plain tokens alone; None: take is to tell."""
        if self.has_unread:
            return None
        more = self._take_more()
        if more is None or not self.has_unread:
            return more
        self._chunks.append(more.chunk())  # behind what came by asking
        return None

    def _check(self) -> None:
        self._is_checked = False
        if self._num_unread > MAX_UNREAD:
            self._is_full = True
            self._chunks, self._num_unread = [], 0
            error = NotRead(f"the client left more than {MAX_UNREAD} tokens unread", limit=MAX_UNREAD)
            self.put(error)  # also where the request has ended meanwhile: its client must not miss that chunks were dropped
            self.on_full(error)


class PacedBuffer:
    """A stream buffer that is read with the rounds of a pace."""

    def __init__(self, pace: StreamPace) -> None:
        self._has_unread = HasUnread(pace)
        self.buffer = StreamBuffer(self._has_unread.tell, merges=pace.merges)

    async def take_unread(self) -> tuple[list[OutputChunk], EngineError | None]:
        """What StreamBuffer.take answers, once there is something."""
        await self._has_unread.wait()
        return self.buffer.take()
