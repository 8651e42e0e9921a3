"""Steps over StreamSteps calls of gRPC. A stream carries the steps of the session of its first message until either ends it.

A failed step ends its stream with the error. Where the client has gone away, the session has a grace to come back.
"""

import asyncio
from collections.abc import Awaitable, Callable

from ..core.values.errors import CacheError
from ..runtime.live_session import CarrierKind, LiveSession
from ..runtime.session_manager import SessionManager
from .methods import EOF
from .step_handler import StepHandler


class StepStream:
    """One call."""

    kind = CarrierKind.GRPC

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.live: LiveSession | None = None
        self.error: CacheError | None = None  # set when the stream is ended from outside
        self._task = task

    def end_with(self, error: CacheError) -> None:
        """Ends the call from outside; its client gets this error."""
        self.error = error
        self._task.cancel()


class StepStreams:
    """The calls of StreamSteps."""

    def __init__(self, session_manager: SessionManager, handler: StepHandler) -> None:
        self._session_manager = session_manager
        self._handler = handler

    async def stream_steps(self, read: Callable[[], Awaitable[bytes]], write: Callable[[bytes], Awaitable[None]]) -> None:
        """Runs one call until its client ends it. Raises CacheError for a failed step, and for an end from outside."""
        task = asyncio.current_task()
        assert task is not None
        stream = StepStream(task)
        is_lost = True
        try:
            while (raw := await read()) is not EOF:
                try:
                    live, reply = self._handler.apply(raw, stream.live)
                    if stream.live is None:
                        stream.live = live
                        self._session_manager.take_stream(live, stream)
                    answer = reply if isinstance(reply, bytes) else await reply
                except Exception:
                    is_lost = False  # this service ends the stream; the client has not gone away
                    raise
                await write(answer)
                self._handler.after_answer(live)  # after the write: work on this loop would delay the sending of the answer
        except asyncio.CancelledError:
            if stream.error is None:
                raise  # the client went away
            is_lost = False
            task.uncancel()
            raise stream.error from None
        finally:
            if stream.live is not None:
                self._session_manager.lose_stream(stream.live, stream, with_grace=is_lost)
