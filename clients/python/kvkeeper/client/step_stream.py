"""One session's stream of steps: serialised request out, serialised answer in, at most one unanswered.

Messages pass as raw bytes, so that a repeat is the same bytes and nothing is parsed twice. They go over the session's step lane
where it has one, and over gRPC otherwise: when the lane has broken, and one by one where they are too large for it. A broken
stream is opened again and the unanswered step repeated, which the service applies exactly once. No task is made per step.
"""

import asyncio
import contextlib
import time
from functools import cached_property
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from kvkeeper.client.errors import KvkeeperError, error_of
from kvkeeper.client.retry import CallOptions, Patience
from kvkeeper.client.step_lane import LaneBroken, MessageTooLarge, StepLane

_METHOD = "/kvkeeper.cache.v1.CacheService/StreamSteps"
_UNARY_METHOD = "/kvkeeper.cache.v1.CacheService/Step"


class StepStream:
    """Not for use from two tasks at once. The stream opens with the first step and lives as long as the session."""

    def __init__(self, channel: Any, options: CallOptions, lane: StepLane | None = None) -> None:
        """lane: taken over, and used for as long as it holds."""
        self._channel = channel
        self._options = options
        self._lane = lane
        self._call: Any = None
        self._busy = False
        self._deadline = 0.0  # of the exchange under way, or of the last one
        self._is_late = False
        self._timer: asyncio.TimerHandle | None = None

    async def exchange(self, request: bytes) -> bytes:
        """The answer to a step. Raises KvkeeperError; the step's outcome is then known only if the service refused it.

        A failure ends the stream; the next step opens another one.
        """
        if self._busy:
            raise RuntimeError("a session has one unanswered step at a time")
        self._busy = True
        self._watch()
        try:
            return await self._write_and_read(request)
        except KvkeeperError as error:
            return await self._repeat(request, error)
        finally:
            self._busy = False

    async def _repeat(self, request: bytes, error: KvkeeperError) -> bytes:
        """The answer after the first try has failed."""
        patience = Patience(self._options, time.monotonic())
        while True:
            pause = patience.pause_after(error, time.monotonic())
            if pause is None:
                raise error
            await asyncio.sleep(pause)
            if self._is_late:
                raise _late()
            try:
                return await self._write_and_read(request)
            except KvkeeperError as again:
                error = again

    def _watch(self) -> None:
        """Makes the exchange end by its deadline.

        One timer runs at a time, and checks when it fires whether the deadline has moved: a timer for each step, almost none
        of which would fire, costs more than the rest of this class.
        """
        loop = asyncio.get_running_loop()
        self._is_late = False
        self._deadline = loop.time() + self._options.timeout_s
        if self._timer is None:
            self._timer = loop.call_at(self._deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._busy:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._deadline:
            self._timer = loop.call_at(self._deadline, self._on_timer)
        else:
            self._is_late = True
            self.cancel()

    async def _write_and_read(self, request: bytes) -> bytes:
        lane = self._lane
        if lane is not None:
            try:
                return await lane.exchange(request)
            except MessageTooLarge:
                return await self._call_once(request)
            except LaneBroken:
                self._lane = None
                if self._is_late:
                    raise _late() from None
            except asyncio.CancelledError:
                lane.close()  # an answer that comes late would be taken for that of the next step
                raise
        call = self._call
        if call is None:
            call = self._call = self._open()  # its deadline is that of each step
        try:
            with contextlib.suppress(asyncio.InvalidStateError):  # the stream has ended: read() tells its status
                await call.write(request)
            answer = await call.read()
        except BaseException as failure:
            is_ours = self._call is not call
            self._end_call()
            if self._is_late and not _is_cancelled():
                raise _late() from None
            if isinstance(failure, grpc.RpcError):
                raise error_of(failure, is_ours=is_ours) from None
            raise
        if answer is EOF:
            self._end_call()
            raise KvkeeperError(grpc.StatusCode.UNAVAILABLE, message="the service ended the stream of steps")
        return answer

    async def _call_once(self, request: bytes) -> bytes:
        """The step as a unary call, which leaves the lane in its place."""
        left = max(self._deadline - asyncio.get_running_loop().time(), 0.001)
        call = self._unary(request, timeout=left)
        try:
            return await call
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        finally:
            call.cancel()  # does nothing to a call that has ended

    @cached_property
    def _open(self) -> Any:
        return self._channel.stream_stream(_METHOD, request_serializer=None, response_deserializer=None)

    @cached_property
    def _unary(self) -> Any:
        return self._channel.unary_unary(_UNARY_METHOD, request_serializer=None, response_deserializer=None)

    @property
    def has_lane(self) -> bool:
        """Whether the next step goes over the lane, if it is not too large for it."""
        return self._lane is not None and self._lane.is_open

    def cancel(self) -> None:
        """End the stream. A session whose stream ends has a short grace to open another."""
        self._end_call()
        if self._lane is not None:
            self._lane.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_call(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


def _late() -> KvkeeperError:
    return KvkeeperError(grpc.StatusCode.DEADLINE_EXCEEDED, message="no answer to a step in time")


def _is_cancelled() -> bool:
    """Whether the running task is being cancelled; a call that is cancelled here ends in the same exception."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
