"""Step and StreamSteps, the hot path: one request in, one reply out, as raw bytes.

Exactly once is a matter of bytes: a repeat is recognised by its bytes, and gets the recorded bytes of the reply. State and
reply are recorded before anything is awaited, so that the repeat of a call that broke off finds its step done. Blocks that the
step committed are published once the reply is on its way. Nothing here loops over items.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

from google.protobuf.message import DecodeError

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.common import tracing

from ..core.step.forecast import Forecast
from ..core.step.reply import copies_of
from ..core.values.errors import CacheError, InvalidField, StreamReplaced
from ..core.values.step_columns import StepBatch
from ..core.values.types import Executor, SessionId
from ..runtime.lease import SessionMode
from ..runtime.live_session import CarrierKind, ForetoldRequest, LiveSession
from ..runtime.session_manager import SessionManager
from .convert.step import step_batch, step_response
from .foretold import ForetoldBytes
from .methods import EOF
from .ownership import check_own

_parse = pb.StepRequest.FromString
_STEP = "kvkeeper.cache.v1.CacheService/Step"


class StepStream:
    """One StreamSteps call. It carries the steps of the session of its first message."""

    kind = CarrierKind.GRPC

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.live: LiveSession | None = None
        self.error: CacheError | None = None  # set when the stream is ended from outside
        self._task = task

    def end_with(self, error: CacheError) -> None:
        """Ends the call from outside; its client gets this error."""
        self.error = error
        self._task.cancel()


class StepHandler:
    """Applies steps to the pools of their sessions, each once, whatever carries them. max_message_bytes: of a request."""

    def __init__(self, session_manager: SessionManager, max_message_bytes: int, *, foretells: bool = True) -> None:
        """foretells: steps are foretold, which changes no reply; a test compares them with those of a handler that does not."""
        self._session_manager = session_manager
        self._max_message_bytes = max_message_bytes
        self._foretells = foretells
        self._preparing: set[SessionId] = set()
        self._tracer = tracing.tracer()

    async def step(self, raw: bytes) -> bytes:
        """The unary call. Raises CacheError."""
        live, reply = self.apply(raw)
        live.pool.finish_step()
        live.pool.publish_soon()
        return reply if isinstance(reply, bytes) else await reply

    async def stream_steps(self, read: Callable[[], Awaitable[bytes]], write: Callable[[bytes], Awaitable[None]]) -> None:
        """Runs one stream until its client ends it. Raises CacheError for a failed step, and for an end from outside."""
        task = asyncio.current_task()
        assert task is not None
        stream = StepStream(task)
        is_lost = True
        try:
            while (raw := await read()) is not EOF:
                try:
                    live, reply = self.apply(raw, stream.live)
                    if stream.live is None:
                        stream.live = live
                        self._session_manager.take_stream(live, stream, replaced())
                    answer = reply if isinstance(reply, bytes) else await reply
                except Exception:
                    is_lost = False  # this service ends the stream; the client has not gone away
                    raise
                await write(answer)
                self.after_answer(live)  # after the write: work on this loop would delay the sending of the answer
        except asyncio.CancelledError:
            if stream.error is None:
                raise  # the client went away
            is_lost = False
            task.uncancel()
            raise stream.error from None
        finally:
            if stream.live is not None:
                self._session_manager.lose_stream(stream.live, stream, with_grace=is_lost)

    def after_answer(self, live: LiveSession) -> None:
        """Does what a step left undone, and foretells the next one. Each carrier calls it once the answer is on its way.

        A carrier awaits nothing between `apply` and this but the copies of an awaitable reply.
        """
        with suppress(OSError):  # a container may deny it
            os.sched_yield()  # a client that was woken on this processor goes first
        session, pool = live.core, live.pool
        pool.finish_step()
        pool.publish_some()
        forecast = pool.manager.foretell(session.id) if self._foretells and not live.over.is_set() else None
        if forecast is None:
            return
        live.foretold = ForetoldBytes(forecast, session.id, session.epoch)
        self.prepare(live)

    def prepare_soon(self, live: LiveSession) -> None:
        """A sequence was created: the answer to the step that may start it is prepared anew, after the answer to this call."""
        if live.foretold is not None and live.core.id not in self._preparing:
            self._preparing.add(live.core.id)
            asyncio.get_running_loop().call_soon(self.prepare, live)

    def prepare(self, live: LiveSession) -> None:
        """Works out what the answer to the foretold step takes, as far as that is known before it comes."""
        session, pool, foretold = live.core, live.pool, live.foretold
        self._preparing.discard(session.id)
        if foretold is None or live.over.is_set() or pool.copying is not None:
            return
        pool.manager.look_ahead(session.id)
        reply = pool.manager.expect_reply(session.id, foretold.whole)
        if reply is not None:
            foretold.answer = step_response(reply, foretold.step_id, session.epoch, session.executor)
            foretold.num_calls = pool.num_calls

    def apply(self, raw: bytes, bound: LiveSession | None = None) -> tuple[LiveSession, bytes | Awaitable[bytes]]:
        """Applies one request, of the bound session if there is one; the reply is awaitable where copies are large.

        Raises CacheError; then nothing has changed but the session's lease.
        """
        if len(raw) > self._max_message_bytes:
            raise InvalidField("the message is too large", field="request", limit=self._max_message_bytes)
        if bound is not None and bound.foretold is not None and bound.pool.copying is None:
            answer = self._apply_foretold(bound, bound.foretold, raw)
            if answer is not None:
                return bound, answer
        try:
            request = _parse(raw)
        except DecodeError:
            raise InvalidField("the bytes are not a StepRequest", field="request") from None
        if request.traceparent:
            with self._span_of(request):
                return self._apply(request, raw, bound)
        return self._apply(request, raw, bound)

    def _apply(
        self, request: pb.StepRequest, raw: bytes, bound: LiveSession | None
    ) -> tuple[LiveSession, bytes | Awaitable[bytes]]:
        if bound is None:  # a call by itself, or the first step of a stream
            check_own(self._session_manager, request)
        live = self._session_manager.require(request.session_id, request.epoch, published=False)
        if live is not bound and bound is not None:
            raise InvalidField("a stream carries the steps of one session", field="session_id")
        if live.pool.copying is not None:
            return live, self._apply_later(live.pool.copying, raw, live)
        session = live.core
        recorded = session.repeat_of(request.step_id, raw)
        if recorded is not None:
            return live, recorded
        session.check_completed(request.step_id, request.completed_step_id)
        return live, self._run(live, raw, step_batch(request))

    def _apply_foretold(self, live: LiveSession, foretold: ForetoldRequest, raw: bytes) -> bytes | Awaitable[bytes] | None:
        """Answers a request that was foretold; None for any other one, which has changed nothing."""
        pool, session = live.pool, live.core
        answer = foretold.answer if foretold.num_calls == pool.num_calls and foretold.is_whole(raw) else None
        step = foretold.read_open(raw) if answer is None else None
        if answer is None and step is None:
            return None
        self._session_manager.require(session.id, session.epoch, published=False)
        if step is not None:
            reply = pool.manager.expect_reply(session.id, step)
            if reply is None:
                return self._run(live, raw, *foretold.step(raw))
            answer = step_response(reply, foretold.step_id, session.epoch, session.executor)
        assert answer is not None
        session.record(foretold.step_id, foretold.completed_step_id, raw, answer)
        live.foretold = None
        pool.postpone_step(partial(_apply_answered, live, answer, foretold, raw))
        return answer

    def _run(
        self, live: LiveSession, raw: bytes, batch: StepBatch, forecast: Forecast | None = None
    ) -> bytes | Awaitable[bytes]:
        """Applies the next step of a session and records its answer."""
        session = live.core
        mode = session.mode
        session.use_mode(SessionMode.STEPS)
        try:
            reply = live.pool.manager.answer_step(session.id, batch, forecast)
        except Exception:
            session.mode = mode
            raise
        live.foretold = None
        answer = step_response(reply, batch.step_id, session.epoch, session.executor)
        session.record(batch.step_id, batch.completed_step_id, raw, answer)
        if session.executor is Executor.CACHE and (len(reply.copy_sources) or len(reply.transfer_ids)):
            copying = live.pool.copy(copies_of(reply))
            if copying is not None:
                live.pool.finish_step()
                return _after(copying, answer)
        return answer

    def _span_of(self, request: pb.StepRequest) -> AbstractContextManager[object]:
        """The span of a step that its engine traces, where this service is traced too. Raises InvalidField."""
        if len(request.traceparent) > tracing.MAX_TRACEPARENT_CHARS:
            text = f"traceparent has at most {tracing.MAX_TRACEPARENT_CHARS} characters"
            raise InvalidField(text, field="traceparent", limit=tracing.MAX_TRACEPARENT_CHARS)
        if self._tracer is None:
            return nullcontext()
        counts = {
            "kvkeeper.step_id": request.step_id,
            "kvkeeper.num_commits": len(request.commit_sequence_ids) // 8,
            "kvkeeper.num_starts": len(request.start_sequence_ids) // 8,
            "kvkeeper.num_reservations": len(request.reserve_sequence_ids) // 8,
        }
        return tracing.serving_step(self._tracer, _STEP, request.traceparent, counts)

    async def _apply_later(self, copying: Awaitable[None], raw: bytes, live: LiveSession) -> bytes:
        await asyncio.shield(copying)
        _, reply = self.apply(raw, live)
        return reply if isinstance(reply, bytes) else await reply


def _apply_answered(live: LiveSession, answer: bytes, foretold: ForetoldRequest, raw: bytes) -> None:
    """Applies a step that was answered by what was known of it."""
    session = live.core
    reply = live.pool.manager.answer_step(session.id, *foretold.step(raw), is_expected=True)
    told = step_response(reply, foretold.step_id, session.epoch, session.executor)
    assert told == answer, "an answer that was foretold wrong"


def replaced() -> StreamReplaced:
    """The error of a carrier that another one took over from."""
    return StreamReplaced("another stream of this session took over")


async def _after(copying: Awaitable[None], answer: bytes) -> bytes:
    await copying
    return answer
