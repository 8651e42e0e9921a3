"""The hot path: one Step in, one reply out, on raw bytes.

Raw, because exactly once is a matter of bytes: a repeat of a request gets the recorded reply, and both are what travelled. The
order within `apply` is the rule: state and reply are recorded before anything is awaited, so that whatever happens to the call
afterwards, its repeat finds the step done. Nothing here loops over items.
"""

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio
from google.protobuf.message import DecodeError

from cache_service import convert
from cache_service.arena.shared_memory import copy_blocks
from cache_service.door import MAX_MESSAGE_BYTES
from cache_service.errors import CacheError, InvalidField, StreamReplaced
from cache_service.keeper import Keeper, LiveSession
from cache_service.session import SessionMode
from cache_service.types import Copies, Executor, StepReply
from kvkeeper.cache.v1 import cache_service_pb2 as pb

_MAX_INLINE_COPY_BYTES = 4 << 20  # about a millisecond; larger copies run in a thread, so that other sessions' steps go on

_parse = pb.StepRequest.FromString


class StepStream:
    """One StreamSteps call. It carries the steps of one session, that of its first message."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.live: LiveSession | None = None
        self.error: CacheError | None = None  # why it was ended from outside
        self._task = task

    def end(self, error: CacheError) -> None:
        """See keeper.Stream."""
        self.error = error
        self._task.cancel()


class StepHandler:
    """Step and StreamSteps."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def step(self, raw: bytes) -> bytes:
        """The unary call. Raises CacheError."""
        _, reply = self.apply(raw)
        return reply if isinstance(reply, bytes) else await reply

    async def stream_steps(self, read: Callable[[], Awaitable[bytes]], write: Callable[[bytes], Awaitable[None]]) -> None:
        """Runs one stream until its client ends it. Raises CacheError: a failed step, or an end from outside."""
        task = asyncio.current_task()
        assert task is not None
        stream = StepStream(task)
        is_lost = True
        try:
            while (raw := await read()) is not grpc.aio.EOF:
                try:
                    live, reply = self.apply(raw, stream.live)
                except Exception:
                    is_lost = False  # this service ends the stream; its client is there
                    raise
                if stream.live is None:
                    stream.live = live
                    self._keeper.take_stream(live, stream, StreamReplaced("another stream of this session took over"))
                await write(reply if isinstance(reply, bytes) else await reply)
        except asyncio.CancelledError:
            if stream.error is None:
                raise  # the client is gone
            is_lost = False
            task.uncancel()
            raise stream.error from None
        finally:
            if stream.live is not None:
                self._keeper.lose_stream(stream.live, stream, with_grace=is_lost)

    def apply(self, raw: bytes, bound: LiveSession | None = None) -> tuple[LiveSession, bytes | Awaitable[bytes]]:
        """Applies one request, of the bound session if there is one; the reply is awaitable while its copies still run.

        Raises CacheError, and then nothing has changed but the session's lease.
        """
        if len(raw) > MAX_MESSAGE_BYTES:
            raise InvalidField("the message is too large", field="request", limit=MAX_MESSAGE_BYTES)
        try:
            request = _parse(raw)
        except DecodeError:
            raise InvalidField("the bytes are not a StepRequest", field="request") from None
        live = self._keeper.require(request.session_id, request.epoch)
        if live is not bound and bound is not None:
            raise InvalidField("a stream carries the steps of one session", field="session_id")
        session = live.core
        step_id = request.step_id
        recorded = session.repeat_of(step_id, raw)
        if recorded is not None:
            return live, recorded if live.copying is None else _after(live.copying, recorded)
        session.check_completed(step_id, request.completed_step_id)
        session.use_mode(SessionMode.STEPS)
        reply = live.pool.manager.step(session.id, convert.step_batch(request))
        answer = convert.step_response(reply, step_id, session.epoch)
        session.record(step_id, request.completed_step_id, raw, answer)
        if session.executor is Executor.CACHE and len(reply.copy_sources):
            return live, self._copy(live, reply, answer)
        live.copying = None
        return live, answer

    def _copy(self, live: LiveSession, reply: StepReply, answer: bytes) -> bytes | Awaitable[bytes]:
        copies = Copies(reply.copy_sources, reply.copy_destinations)
        blocks = live.pool.blocks
        if len(copies.sources) * blocks.shape[1] <= _MAX_INLINE_COPY_BYTES:
            copy_blocks(blocks, copies)
            live.copying = None
            return answer
        # A task of the service, not of the call: it goes on when the call is cancelled, and a repeat awaits it too.
        live.copying = asyncio.create_task(asyncio.to_thread(copy_blocks, blocks, copies))
        return _after(live.copying, answer)


async def _after(copying: asyncio.Task[None], answer: bytes) -> bytes:
    await asyncio.shield(copying)
    return answer
