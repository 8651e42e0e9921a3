"""What one stream's client has not read yet, bounded.

The loop puts and never waits; the stream's task takes all that is there at once. A client that stops reading would otherwise
fill this process with what is generated for it: when too much is unread although the stream's task had its turn, what is unread
is dropped and the request is to end. Much that comes at once is no fault. Knows no wire.
"""

import asyncio
from collections.abc import Callable

from ..values.errors import EngineError, NotRead
from ..values.output_chunk import OutputChunk, coalesce

MAX_UNREAD = 1 << 16  # tokens, and log probabilities told beside them; some 20 MB


class StreamBuffer:
    """See the module. on_full is called once, outside of put. To be made and used on the running loop."""

    def __init__(self) -> None:
        self.on_full: Callable[[EngineError], None] = lambda refusal: None
        self._pieces: list[OutputChunk] = []
        self._num_unread = 0
        self._refusal: EngineError | None = None
        self._has_news = asyncio.Event()
        self._is_checked = False
        self._is_full = False

    def put(self, news: OutputChunk | EngineError) -> None:
        if isinstance(news, EngineError):
            self._refusal = news
        elif not self._is_full:
            self._pieces.append(news)
            self._num_unread += len(news.token_ids) + sum(1 + len(one.top_token_ids) for one in news.logprobs)
        self._has_news.set()
        if self._num_unread > MAX_UNREAD and not self._is_checked:
            self._is_checked = True
            asyncio.get_running_loop().call_soon(self._check)  # behind the stream's task, if that waits for news

    async def take(self) -> tuple[list[OutputChunk], EngineError | None]:
        """Everything that has come, in fewer pieces where they are neighbours, and why nothing more will."""
        await self._has_news.wait()
        self._has_news.clear()
        pieces, self._pieces, self._num_unread = self._pieces, [], 0
        return coalesce(pieces), self._refusal

    def _check(self) -> None:
        self._is_checked = False
        if self._num_unread > MAX_UNREAD:
            self._is_full = True
            self._pieces, self._num_unread = [], 0
            refusal = NotRead(f"more than {MAX_UNREAD} tokens were not read", limit=MAX_UNREAD)
            self.put(refusal)  # also where the request has ended meanwhile: what was dropped is not to be missed
            self.on_full(refusal)
