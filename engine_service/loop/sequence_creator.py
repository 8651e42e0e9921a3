"""SequenceCreator: tells the cache service of waiting sequences, beside the steps, so that no step waits for it.

One task per session, in order of the queue, as far as the cache service has slots. Many calls are under way at once where their
prompts are short: each has to wait for turns of a loop that is busy with steps, and what is created together starts together,
in one step instead of many. A refusal for want of a slot is tried again; any other refusal ends that request alone; a lost
session ends the task, and wakes the loop.
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

_MOST_AT_ONCE = 64  # calls
_MOST_TOKENS_AT_ONCE = 1 << 20  # of their prompts, 4 MiB, which one alone may have
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
        self._calls: dict[asyncio.Task[bool], int] = {}  # under way, or ended since the task looked last; tokens of each
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
                ended = [call for call in self._calls if call.done()]
                results = [call.result() for call in ended]  # where one raises, the others' errors are taken below
                for call in ended:
                    del self._calls[call]
                has_slot = all(results)
                while has_slot and self._has_room():
                    if (sequence := self._scheduler.next_to_create()) is None:
                        break
                    with self._tracing.within_request(sequence.request):
                        call = asyncio.create_task(self._create(sequence))
                    call.add_done_callback(lambda _: self._wake.creator.set())
                    self._calls[call] = len(sequence.token_ids)
                await wait_for(self._wake.creator, None if has_slot else _RETRY_S)
        finally:
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
            self._wake.loop.set()

    def _has_room(self) -> bool:
        """Whether another call may begin."""
        sizes = self._calls.values()
        return len(sizes) < _MOST_AT_ONCE and sum(sizes) < _MOST_TOKENS_AT_ONCE

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
