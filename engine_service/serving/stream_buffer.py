"""StreamBuffer: what one stream's client has not read yet, bounded.

What comes from the engine is put and never waits; the stream's task takes everything that is there at once. A client that stops
reading would otherwise fill this process with what is generated for it: when too much is unread although the stream's task had
its turn, it is dropped and the request is to end. Much that comes at once is no fault. Knows no wire.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from ..rpc.stream_pace import HasUnread, StreamPace
from ..values.errors import EngineError, NotRead
from ..values.output_chunk import OutputChunk, coalesce

MAX_UNREAD = 1 << 16  # tokens, and log probabilities beside them; about 20 MB


class Notifier(Protocol):
    """Says that there is something unread; at_once: it does not wait for a round of writes."""

    def __call__(self, *, at_once: bool) -> None: ...


class StreamBuffer:
    """The unread output of one stream, and the error that ends it. To be made and used on the running loop.

    on_full is called once, outside of put and add, with the error of a client that does not read.
    """

    def __init__(self, notify: Notifier, *, merges: bool = True) -> None:
        """merges: whether tokens that come until they are read are read as one."""
        self._merges = merges
        self.on_full: Callable[[EngineError], None] = lambda error: None
        self._notify = notify
        self._chunks: list[OutputChunk] = []
        self._token_ids: list[int] = []  # of continuation 0, behind the chunks
        self._texts: list[str] = []  # of each of them, or none where they have none
        self._num_unread = 0
        self._error: EngineError | None = None
        self._is_checked = False
        self._is_full = False

    def put(self, output: OutputChunk | EngineError) -> None:
        if isinstance(output, EngineError):
            self._error = output
        elif not self._is_full:
            self._settle()
            self._chunks.append(output)
            self._num_unread += len(output.token_ids) + sum(1 + len(one.top_token_ids) for one in output.logprobs)
        is_last = isinstance(output, EngineError) or output.usage is not None
        self._note_more(at_once=is_last)

    def add(self, token_ids: Sequence[int], texts: Sequence[str] = ()) -> None:
        """Tokens of continuation 0, of which nothing more than the text of each, if any, is to be reported."""
        if not self._is_full:
            self._token_ids += token_ids
            self._texts += texts
            self._num_unread += len(token_ids)
            if self._num_unread <= MAX_UNREAD:
                self._notify(at_once=False)
            else:
                self._note_more(at_once=False)

    @property
    def has_unread(self) -> bool:
        return bool(self._chunks or self._token_ids) or self._error is not None

    def take(self) -> tuple[list[OutputChunk], EngineError | None]:
        """Everything that has come, neighbouring chunks joined where they may be, and the error after which nothing comes."""
        self._settle()
        chunks, self._chunks, self._num_unread = self._chunks, [], 0
        return (coalesce(chunks) if self._merges else chunks), self._error

    def take_tokens(self) -> tuple[list[int], str] | None:
        """Everything that has come, tokens and text, where nothing else is to be reported; None: take has the rest."""
        if self._chunks or not self._token_ids or self._error is not None:
            return None
        token_ids, texts = self._token_ids, self._texts
        self._token_ids, self._texts, self._num_unread = [], [], 0
        return token_ids, "".join(texts)

    def _settle(self) -> None:
        """Make chunks of the tokens, because something else follows, or is to be read with them."""
        if not self._token_ids:
            return
        if self._merges:
            self._chunks.append(OutputChunk(0, "".join(self._texts), tuple(self._token_ids)))
        else:
            each = zip(self._token_ids, self._texts or [""] * len(self._token_ids), strict=True)
            self._chunks += [OutputChunk(0, text, (token_id,)) for token_id, text in each]
        self._token_ids, self._texts = [], []

    def _note_more(self, *, at_once: bool) -> None:
        self._notify(at_once=at_once or self._num_unread > MAX_UNREAD)
        if self._num_unread > MAX_UNREAD and not self._is_checked:
            self._is_checked = True
            asyncio.get_running_loop().call_soon(self._check)  # after the stream's task, if that is waiting

    def _check(self) -> None:
        self._is_checked = False
        if self._num_unread > MAX_UNREAD:
            self._is_full = True
            self._chunks, self._token_ids, self._texts, self._num_unread = [], [], [], 0
            error = NotRead(f"the client left more than {MAX_UNREAD} tokens unread", limit=MAX_UNREAD)
            self.put(error)  # also where the request has ended meanwhile: its client must not miss that chunks were dropped
            self.on_full(error)


class PacedBuffer:
    """A stream buffer that is read with the rounds of a pace."""

    def __init__(self, pace: StreamPace) -> None:
        self._has_unread = HasUnread(pace)
        self.buffer = StreamBuffer(self._has_unread.notify, merges=pace.merges)

    async def take_unread(self) -> tuple[list[OutputChunk], EngineError | None]:
        """What StreamBuffer.take returns, once there is something."""
        await self._has_unread.wait()
        return self.buffer.take()
