"""What carries the steps of one session, and a few calls beside them: its step lane where it has one, and gRPC otherwise.

Requests pass as raw bytes, at most one step of them unanswered. A lane that broke is not used again, and a request that is too
large for it goes as a call of its own. Whatever broke, the unanswered step is repeated with the same bytes, which the service
applies exactly once. No task is made per step. Without an event loop there is no stream: each step over gRPC is a call.
"""

import asyncio
import time
from functools import cached_property
from typing import Any

import grpc

from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.retry import Patience
from kvkeeper.client.step_lane import CALL, BlockingStepLane, LaneBroken, MessageTooLarge, StepLane
from kvkeeper.client.step_stream import StepStream
from kvkeeper.client.transport import AsyncTransport
from kvkeeper.common import tracing

_METHOD = "/kvkeeper.cache.v1.CacheService/Step"
_MOST_CALLS = 8  # unanswered on the lane; others wait for their turn, or a crowd would fill it


class StepCarriers:
    """Not for use from two threads at once. Steps are of one task at a time; calls may come from several."""

    def __init__(self, transport: AsyncTransport) -> None:
        self.lane: StepLane | BlockingStepLane | None = None
        self._transport = transport
        self._stream = StepStream(transport) if transport.backend.has_loop else None
        self._calling, self._num_calls = asyncio.Semaphore(_MOST_CALLS), 0
        self._busy = False
        self._deadline = 0.0  # of the last exchange
        self._is_late = False
        self._timer: asyncio.TimerHandle | None = None

    async def exchange(self, request: bytes) -> bytes:
        """The answer to a step. Raises KvkeeperError; the step's outcome is then known only if the service refused it."""
        if self._busy:
            raise RuntimeError("a session has one unanswered step at a time")
        self._busy = True
        self._watch()
        try:
            return await self._send(request)
        except KvkeeperError as error:
            return await self._repeat(request, error)
        finally:
            self._busy = False

    async def call(self, method: str, request: bytes) -> bytes | None:
        """The answer to a call over the lane, beside the steps; None where it has to go over gRPC. For what may be repeated.

        gRPC carries what belongs to a trace, and what is to be tried again. Raises KvkeeperError.
        """
        lane = self.lane
        if lane is None or tracing.outgoing() is not None:
            return None
        async with self._calling:
            self._num_calls += 1
            self._watch()
            try:
                return await lane.exchange(bytes((len(method),)) + method.encode() + request, CALL)
            except MessageTooLarge:
                return None
            except LaneBroken:
                if self._is_late:
                    raise _late() from None
                return None
            except KvkeeperError as error:
                if error.unavailable:
                    return None
                raise
            finally:
                self._num_calls -= 1

    async def _send(self, request: bytes) -> bytes:
        try:
            if self.lane is not None:
                try:
                    return await self.lane.exchange(request)
                except MessageTooLarge:
                    return await self._call(request)
                except LaneBroken:
                    self.lane = None
            if self._is_late:
                raise _late()
            if self._stream is None:
                return await self._call(request)
            return await self._stream.exchange(request)
        except BaseException:
            if self._is_late and not _is_cancelled():
                raise _late() from None
            raise

    async def _repeat(self, request: bytes, error: KvkeeperError) -> bytes:
        """The answer after the first try has failed."""
        patience = Patience(self._transport.options, time.monotonic())
        while True:
            pause = patience.pause_after(error, time.monotonic())
            if pause is None:
                raise error
            await self._transport.backend.sleep(pause)
            if self._is_late:
                raise _late()
            try:
                return await self._send(request)
            except KvkeeperError as again:
                error = again

    async def _call(self, request: bytes) -> bytes:
        """The step as a call of its own."""
        left = max(self._deadline - time.monotonic(), 0.001)
        answer: bytes = await self._transport.call_once(self._unary, request, left)
        return answer

    @cached_property
    def _unary(self) -> Any:
        return self._transport.channel.unary_unary(_METHOD, request_serializer=None, response_deserializer=None)

    def _watch(self) -> None:
        """Makes what waits end by the deadline of the last that began. On a loop one timer runs at a time, and checks when it
        fires whether the deadline has moved: a timer for each step, almost none of which would fire, costs more than the rest
        of this class.
        """
        self._is_late = False
        self._deadline = time.monotonic() + self._transport.options.timeout_s
        if self._timer is None and self._stream is not None:
            self._timer = asyncio.get_running_loop().call_at(self._deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._busy and not self._num_calls:
            return
        if time.monotonic() < self._deadline:
            self._timer = asyncio.get_running_loop().call_at(self._deadline, self._on_timer)
        else:
            self._is_late = True
            self.cancel()

    @property
    def has_lane(self) -> bool:
        """Whether the next step goes over the lane, if it is not too large for it."""
        return self.lane is not None and self.lane.is_open

    def cancel(self) -> None:
        """End the lane and the stream. A session whose stream ends has a short grace to open another."""
        if self._stream is not None:
            self._stream.cancel()
        if self.lane is not None:
            self.lane.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _late() -> KvkeeperError:
    return KvkeeperError(grpc.StatusCode.DEADLINE_EXCEEDED, message="no answer in time")


def _is_cancelled() -> bool:
    """Whether the running task is being cancelled; a call that is cancelled here ends in the same exception."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
