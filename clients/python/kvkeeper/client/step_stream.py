"""One session's stream of steps: serialised request out, serialised answer in, at most one unanswered.

Messages pass as raw bytes, so that a repeat is the same bytes and nothing is parsed twice. A broken stream is opened
again and the unanswered step repeated, which the service answers exactly once. No task is made per step.
"""

import asyncio
import contextlib
import time
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from kvkeeper.client.errors import KvkeeperError, error_of
from kvkeeper.client.retry import CallOptions, Patience

_METHOD = "/kvkeeper.cache.v1.CacheService/StreamSteps"


class StepStream:
    """Not for use from two tasks at once. The stream opens with the first step and lives as long as the session."""

    def __init__(self, channel: grpc.aio.Channel, options: CallOptions) -> None:
        self._open: Any = channel.stream_stream(_METHOD, request_serializer=None, response_deserializer=None)
        self._options = options
        self._call: Any = None
        self._busy = False

    async def exchange(self, request: bytes) -> bytes:
        """The answer to a step. Raises KvkeeperError; the step's outcome is then known only if the service refused it.

        A failure ends the stream; the next step opens another one.
        """
        if self._busy:
            raise RuntimeError("a session has one unanswered step at a time")
        self._busy = True
        try:
            async with asyncio.timeout(self._options.timeout_s):
                return await self._exchange(request)
        except TimeoutError:
            raise KvkeeperError(grpc.StatusCode.DEADLINE_EXCEEDED, message="no answer to a step in time") from None
        finally:
            self._busy = False

    async def _exchange(self, request: bytes) -> bytes:
        patience: Patience | None = None  # made only when something failed: this is the hot path
        while True:
            try:
                return await self._write_and_read(request)
            except KvkeeperError as error:
                now = time.monotonic()
                patience = patience or Patience(self._options, now)
                pause = patience.pause_after(error, now)
                if pause is None:
                    raise
            await asyncio.sleep(pause)

    async def _write_and_read(self, request: bytes) -> bytes:
        if self._call is None:
            self._call = self._open()  # its deadline is that of each step
        try:
            with contextlib.suppress(asyncio.InvalidStateError):  # ended since the last step: read() tells its status
                await self._call.write(request)
            answer = await self._call.read()
        except grpc.RpcError as failure:
            self.cancel()
            raise error_of(failure) from None
        except BaseException:
            self.cancel()
            raise
        if answer is EOF:
            self.cancel()
            raise KvkeeperError(grpc.StatusCode.UNAVAILABLE, message="the service ended the stream of steps")
        return answer

    def cancel(self) -> None:
        """End the stream. A session whose stream ends has a short grace to open another."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
