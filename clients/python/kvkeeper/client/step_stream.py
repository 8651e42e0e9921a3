"""Steps over one StreamSteps call of gRPC, for asyncio. It opens with the first step; a failure ends it, and the next step
opens another one."""

import asyncio
import contextlib
from functools import cached_property
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.transport import AsyncTransport

_METHOD = "/kvkeeper.cache.v1.CacheService/StreamSteps"


class StepStream:
    """Not for use from two tasks at once. Sets no deadline: cancel() ends a step that waits for its answer."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self._call: Any = None

    @cached_property
    def _open(self) -> Any:
        return self._transport.channel.stream_stream(_METHOD, request_serializer=None, response_deserializer=None)

    async def exchange(self, request: bytes) -> bytes:
        """The answer to a step. Raises KvkeeperError."""
        call = self._call
        if call is None:
            call = self._call = self._open()
        try:
            with contextlib.suppress(asyncio.InvalidStateError):  # the stream has ended: read() reports its status
                await call.write(request)
            answer = await call.read()
        except BaseException as failure:
            is_ours = self._call is not call
            self.cancel()
            if isinstance(failure, grpc.RpcError):
                raise self._transport.reach.to_error(failure, is_ours=is_ours) from None
            raise
        if answer is EOF:
            self.cancel()
            raise KvkeeperError(grpc.StatusCode.UNAVAILABLE, message="the service ended the stream of steps")
        return answer

    def cancel(self) -> None:
        """End the call. A session whose stream ends has a short grace to open another."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
