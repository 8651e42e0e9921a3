"""SequenceCreator: reports waiting sequences to the cache service, beside the steps, so that no step waits for it.

One task per session, in order of the queue, as far as the cache service has slots. What waits is created in one call: a call of
many costs a fraction of as many calls, and what is created together starts together, in one step instead of many. What comes
meanwhile gathers for the next call; a long prompt has a call of its own, which holds up no other. A refusal for want of a slot
is tried again, and the log says what is waited for where that lasts; any other refusal ends that request alone; a lost session
ends the task, and wakes the loop.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import structlog

from kvkeeper.client.errors import KvkeeperError

from ..cache_session.failures import is_invalid, is_out_of_sequences
from ..scheduler.scheduler import Scheduler
from ..values.errors import EngineError, RequestFailed
from ..values.request import Request, Sequence
from .between_steps import Wake, wait_for
from .tracing import EngineTracing

_MOST_CALLS = 4  # under way at once
_MOST_IN_CALL = 32  # sequences: a step waits behind no more, and the first of a burst starts while the rest is created
_MOST_TOKENS_IN_CALL = 1 << 16  # of their prompts, 256 KiB; a prompt that has more goes alone
_RETRY_S = 0.05  # another engine that frees a slot does not notify this one
_USUAL_WAIT_S = 1.0  # for a slot; what lasts longer is logged
_LOG_PAUSE_S = 10.0

log = structlog.get_logger()

# The start number of each sequence, or why it was refused. Raises KvkeeperError where that is not known.
Create = Callable[[list[Sequence]], Awaitable[list[int | KvkeeperError]]]


class SequenceCreator:
    """The task that creates one session's sequences. It wakes the loop when a sequence may start, and when it fails itself."""

    def __init__(
        self,
        scheduler: Scheduler,
        create: Create,
        wake: Wake,
        fail: Callable[[Request, EngineError], None],
        tracing: EngineTracing,
    ) -> None:
        self._scheduler = scheduler
        self._create_all = create
        self._wake = wake
        self._fail = fail
        self._tracing = tracing
        self._calls: dict[asyncio.Task[bool], bool] = {}  # under way, or ended since it looked last: of a long prompt alone?
        self._held: Sequence | None = None  # for the next call: its prompt had no room in the one before
        self._log_at: float | None = None  # when to log that there is no slot; None while there is one
        self._task = asyncio.create_task(self._run())

    def proceed(self) -> None:
        """There may be something to create, or a slot for it. Raises the error that ended the task, if one has."""
        if self._task.done():
            self._task.result()
        if self._calls or self._held is not None or self._scheduler.num_waiting:
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
                if not has_slot and self._held is not None:
                    self._scheduler.waiting.create_refused(self._held, try_again=True)
                    self._held = None
                if not self._calls and not self._scheduler.num_waiting:
                    self._log_at = None  # what waited for a slot is gone
                while has_slot and self._may_call() and (together := self._next_together()):
                    self._begin(together)
                await wait_for(self._wake.creator, None if has_slot else _RETRY_S)
        finally:
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
            self._wake.loop.set()

    def _may_call(self) -> bool:
        """Whether another call may begin: beside those of long prompts alone."""
        return len(self._calls) < _MOST_CALLS and all(self._calls.values())

    def _next_together(self) -> list[Sequence]:
        """The sequences of the next call, in the queue's order; none where nothing is to be created."""
        together, num_tokens = list[Sequence](), 0
        while len(together) < _MOST_IN_CALL:
            sequence, self._held = self._held or self._scheduler.next_to_create(), None
            if sequence is None:
                break
            num_tokens += len(sequence.token_ids)
            if together and num_tokens > _MOST_TOKENS_IN_CALL:
                self._held = sequence
                break
            together.append(sequence)
        return together

    def _begin(self, together: list[Sequence]) -> None:
        with self._tracing.within_request(*(sequence.request for sequence in together)):
            call = asyncio.create_task(self._create(together))
        call.add_done_callback(lambda _: self._wake.creator.set())
        self._calls[call] = sum(len(sequence.token_ids) for sequence in together) > _MOST_TOKENS_IN_CALL

    async def _create(self, together: list[Sequence]) -> bool:
        """False when there is no slot for now."""
        has_slot = True
        for sequence, result in zip(together, await self._create_all(together), strict=True):
            has_slot &= self._take_result(sequence, result)
        self._wake.loop.set()  # where there is no slot, sequences that hold one may have to be preempted
        return has_slot

    def _take_result(self, sequence: Sequence, result: int | KvkeeperError) -> bool:
        """What became of one of them. False when there is no slot for now. Raises the error that is none of the sequence's."""
        if not isinstance(result, KvkeeperError):
            self._log_at = None
            sequence.request.start_number = result
            self._scheduler.waiting.created(sequence)
            return True
        is_bad = is_invalid(result)
        self._scheduler.waiting.create_refused(sequence, try_again=not is_bad)
        if is_bad:
            self._fail(sequence.request, RequestFailed(f"the cache service refused the sequence: {result.reason}"))
        elif not is_out_of_sequences(result):
            raise result
        else:
            self._note_no_slot(result)
        return is_bad

    def _note_no_slot(self, refused: KvkeeperError) -> None:
        """Other callers may hold all slots for long, and then this engine would wait without a word."""
        now = time.monotonic()
        if self._log_at is None:
            self._log_at = now + _USUAL_WAIT_S
        if now >= self._log_at:
            self._log_at = now + _LOG_PAUSE_S
            log.warning("waiting_for_slots", num_waiting=self._scheduler.num_waiting, message=refused.message)
