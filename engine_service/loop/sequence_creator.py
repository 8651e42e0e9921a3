"""SequenceCreator: tells the cache service of waiting sequences, beside the steps, so that no step waits for it.

One task per session, in order of the queue, as far as the cache service has slots. A refusal for want of a slot is
tried again; any other refusal ends that request alone; a lost session ends the task, and the loop is told.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import asdict

import grpc

from kvkeeper.cache.v1 import cache_service_pb2 as pb
from kvkeeper.client.cache import AsyncCacheSession
from kvkeeper.client.errors import KvkeeperError

from ..scheduler.scheduler import Scheduler
from ..values.errors import EngineError, RequestFailed
from ..values.request import Request, Sequence
from .tracing import EngineTracing

_RETRY_S = 0.05  # slots that another engine holds come free without a word to us


class SequenceCreator:
    """See the module. `wake` is set when a sequence may start, or the task has failed."""

    def __init__(
        self,
        scheduler: Scheduler,
        session: AsyncCacheSession,
        wake: asyncio.Event,
        fail: Callable[[Request, EngineError], None],
        tracing: EngineTracing,
    ) -> None:
        self._scheduler = scheduler
        self._session = session
        self._wake = wake
        self._fail = fail
        self._tracing = tracing
        self._kicked = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def kick(self) -> None:
        """There may be something to create, or a slot for it."""
        self._kicked.set()

    def proceed(self) -> None:
        """kick, from the loop. Raises what ended the task."""
        if self._task.done():
            self._task.result()
        self._kicked.set()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, KvkeeperError):
            await self._task

    async def _run(self) -> None:
        try:
            while True:
                self._kicked.clear()
                had_slot = True
                while had_slot and (sequence := self._scheduler.next_to_create()) is not None:
                    with self._tracing.within(sequence.request):
                        had_slot = await self._create(sequence)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if had_slot else _RETRY_S):
                        await self._kicked.wait()
        finally:
            self._wake.set()

    async def _create(self, sequence: Sequence) -> bool:
        """False when there is no slot for now."""
        request = sequence.request
        assert sequence.sequence_id is not None
        try:
            created = await self._session.create_sequence(
                sequence.sequence_id,
                sequence.token_ids,
                request.max_len,
                request.tenant,
                request.priority,
                None if request.retention is None else pb.Retention(**asdict(request.retention)),
                request.start_number,
            )
        except KvkeeperError as error:
            is_bad = error.code is grpc.StatusCode.INVALID_ARGUMENT
            self._scheduler.waiting.create_refused(sequence, try_again=not is_bad)
            if error.reason == "OUT_OF_SEQUENCES":
                self._wake.set()  # what waits for it may have to give way
                return False
            if not is_bad:
                raise
            self._fail(request, RequestFailed(f"the cache service refused it: {error.reason}"))
        else:
            request.start_number = created.start_number
            self._scheduler.waiting.created(sequence)
            self._wake.set()
        return True
