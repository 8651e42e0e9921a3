"""The engine service for threads: the calls of client.py, blocking."""

import threading
from collections.abc import Callable, Iterator

from kvkeeper.client.backends import BLOCKING, Closing, blocking, run
from kvkeeper.client.credentials import Credentials
from kvkeeper.client.engine.calls import GenerateOptions, OutputChunk, Usage
from kvkeeper.client.engine.client import AsyncEngineClient, AsyncGeneration, call_back
from kvkeeper.client.engine.prompts import Prompt
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.retry import CallOptions
from kvkeeper.client.transport import run_next


class EngineClient(Closing):
    __doc__ = AsyncEngineClient.__doc__

    def __init__(
        self,
        target: str | None = None,
        options: CallOptions | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """credentials: None takes those of the environment. Raises KvkeeperError where they cannot be used."""
        self._inner = AsyncEngineClient(target, options, credentials, backend=BLOCKING)

    def generate(self, prompt: Prompt, options: GenerateOptions | None = None) -> "Generation":
        """Continue a prompt: text, token ids, or a conversation: a Chat, or its messages."""
        return Generation(self._inner.generate(prompt, options))

    def follow(self, request_id: str, reconnect_s: float = 10.0) -> "Generation":
        """The output of a submitted request from its beginning, as it comes.

        Where the connection breaks, the stream continues from there; reconnect_s: for how long the engine may be away.
        """
        return Generation(self._inner.follow(request_id, reconnect_s))

    def call_back(
        self,
        prompt: Prompt,
        on_chunk: Callable[[OutputChunk], None],
        on_end: Callable[[Usage | KvkeeperError], None],
        options: GenerateOptions | None = None,
    ) -> "Generation":
        """Continue a prompt in the background: on_chunk gets each chunk, on_end the usage or the error, exactly once.

        The two are called one at a time, and a slow one delays this request alone. close() ends the request early.
        """
        generation = self._inner.generate(prompt, options)
        threading.Thread(target=lambda: run(call_back(generation, on_chunk, on_end)), daemon=True).start()
        return Generation(generation)

    submit = blocking(AsyncEngineClient.submit)
    result = blocking(AsyncEngineClient.result)
    iteration_plan = blocking(AsyncEngineClient.iteration_plan)
    cancel = blocking(AsyncEngineClient.cancel)
    tokenize = blocking(AsyncEngineClient.tokenize)
    detokenize = blocking(AsyncEngineClient.detokenize)
    pieces = blocking(AsyncEngineClient.pieces)
    model = blocking(AsyncEngineClient.model)
    stats = blocking(AsyncEngineClient.stats)
    list_requests = blocking(AsyncEngineClient.list_requests)
    close = blocking(AsyncEngineClient.close)


class Generation(Closing):
    __doc__ = AsyncGeneration.__doc__

    def __init__(self, inner: AsyncGeneration) -> None:
        self._inner = inner

    @property
    def request_id(self) -> str:
        return self._inner.request_id

    @property
    def usage(self) -> Usage | None:
        return self._inner.usage

    def __iter__(self) -> Iterator[OutputChunk]:
        return self

    def __next__(self) -> OutputChunk:
        chunk: OutputChunk = run_next(self._inner)
        return chunk

    def close(self) -> None:
        """End the stream, and with it a request of generate() that still runs."""
        self._inner.close()
