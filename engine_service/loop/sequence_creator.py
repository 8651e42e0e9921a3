"""SequenceCreator: tells the cache service of waiting sequences, beside the steps, so that no step waits for it.

One task per session, in order of the queue, as far as the cache service has slots. A refusal for want of a slot is
tried again; any other refusal ends that request alone; a lost session ends the task, and wakes the loop.
"""

import asyncio
import contextlib
from collections.abc import Callable

from kvkeeper.client.errors import KvkeeperError

from ..cache_session.failures import is_invalid, is_out_of_sequences
from ..cache_session.kv_memory import KvMemory
from ..scheduler.scheduler import Scheduler
from ..values.errors import EngineError, RequestFailed
from ..values.request import Request, Sequence
from .tracing import EngineTracing
from .wake import Wake, wait_for

_RETRY_S = 0.05  # another engine that frees a slot does not tell this one


class SequenceCreator:
    """The task that creates one session's sequences. It wakes the loop when a sequence may start, and when it fails itself."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: KvMemory,
        wake: Wake,
        fail: Callable[[Request, EngineError], None],
        tracing: EngineTracing,
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._wake = wake
        self._fail = fail
        self._tracing = tracing
        self._task = asyncio.create_task(self._run())

    def proceed(self) -> None:
        """There may be something to create, or a slot for it. Raises the error that ended the task, if one has."""
        if self._task.done():
            self._task.result()
        self._wake.creator.set()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, KvkeeperError):
            await self._task

    async def _run(self) -> None:
        try:
            while True:
                self._wake.creator.clear()
                had_slot = True
                while had_slot and (sequence := self._scheduler.next_to_create()) is not None:
                    with self._tracing.within_request(sequence.request):
                        had_slot = await self._create(sequence)
                await wait_for(self._wake.creator, None if had_slot else _RETRY_S)
        finally:
            self._wake.loop.set()

    async def _create(self, sequence: Sequence) -> bool:
        """False when there is no slot for now."""
        request = sequence.request
        try:
            start_number = await self._memory.create_sequence(sequence)
        except KvkeeperError as error:
            is_bad = is_invalid(error)
            self._scheduler.waiting.create_refused(sequence, try_again=not is_bad)
            if is_out_of_sequences(error):
                self._wake.loop.set()  # sequences that hold a slot may have to be preempted for this one
                return False
            if not is_bad:
                raise
            self._fail(request, RequestFailed(f"the cache service refused the sequence: {error.reason}"))
        else:
            request.start_number = start_number
            self._scheduler.waiting.created(sequence)
            self._wake.loop.set()
        return True
