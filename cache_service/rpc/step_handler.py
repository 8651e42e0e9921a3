"""Steps, the hot path: one request in, one reply out, as raw bytes, whatever carries them.

Exactly once is a matter of bytes: a repeat is recognised by its bytes, and gets the recorded bytes of the reply. State and
reply are recorded before anything is awaited, so that the repeat of a call that broke off finds its step done. Blocks that the
step committed are published once the reply is on its way. Nothing here loops over items.
"""

import asyncio
import os
from collections.abc import Awaitable
from contextlib import AbstractContextManager, nullcontext, suppress

from google.protobuf.message import DecodeError

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.common import tracing

from ..core.step.reply import list_copies
from ..core.values.errors import InvalidField
from ..core.values.step_columns import StepBatch
from ..core.values.types import Executor
from ..runtime.lease import SessionMode
from ..runtime.live_session import LiveSession
from ..runtime.session_manager import SessionManager
from .convert.step import step_batch, step_response
from .ownership import check_own

_parse = pb.StepRequest.FromString
_STEP = "kvkeeper.cache.v1.CacheService/Step"


class StepHandler:
    """Applies steps to the pools of their sessions, each once, whatever carries them. max_message_bytes: of a request."""

    def __init__(self, session_manager: SessionManager, max_message_bytes: int) -> None:
        self._session_manager = session_manager
        self._max_message_bytes = max_message_bytes
        self._tracer = tracing.tracer()

    async def step(self, raw: bytes) -> bytes:
        """A step that is a call of its own. Raises CacheError."""
        live, reply = self.apply(raw)
        live.pool.publish_soon()
        return reply if isinstance(reply, bytes) else await reply

    def after_answer(self, live: LiveSession) -> None:
        """Does what a step left undone. Each carrier calls it once the answer is on its way.

        A carrier awaits nothing between `apply` and this but the copies of an awaitable reply.
        """
        with suppress(OSError):  # a container may deny it
            os.sched_yield()  # a client that was woken on this processor goes first
        live.pool.publish_some()

    def apply(self, raw: bytes, bound: LiveSession | None = None) -> tuple[LiveSession, bytes | Awaitable[bytes]]:
        """Applies one request, of the bound session if there is one; the reply is awaitable where copies are large.

        Raises CacheError; then nothing has changed but the session's lease.
        """
        if len(raw) > self._max_message_bytes:
            raise InvalidField("the message is too large", field="request", limit=self._max_message_bytes)
        try:
            request = _parse(raw)
        except DecodeError:
            raise InvalidField("the bytes are not a StepRequest", field="request") from None
        if request.traceparent:
            with self._start_span(request):
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
        recorded = session.find_repeat(request.step_id, raw)
        if recorded is not None:
            return live, recorded
        session.check_completed(request.step_id, request.completed_step_id)
        return live, self._run(live, raw, step_batch(request))

    def _run(self, live: LiveSession, raw: bytes, batch: StepBatch) -> bytes | Awaitable[bytes]:
        """Applies the next step of a session and records its answer."""
        session = live.core
        mode = session.mode
        session.use_mode(SessionMode.STEPS)
        try:
            reply = live.pool.manager.steps.step(session.id, batch)
        except Exception:
            session.mode = mode
            raise
        answer = step_response(reply, batch.step_id, session.epoch, session.executor)
        session.record(batch.step_id, batch.completed_step_id, raw, answer)
        if session.executor is Executor.CACHE and (len(reply.copy_sources) or len(reply.transfer_ids)):
            copying = live.pool.copy(list_copies(reply))
            if copying is not None:
                return _after(copying, answer)
        return answer

    def _start_span(self, request: pb.StepRequest) -> AbstractContextManager[object]:
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


async def _after(copying: Awaitable[None], answer: bytes) -> bytes:
    await copying
    return answer
