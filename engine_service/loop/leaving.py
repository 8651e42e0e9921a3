"""Leaving: the open requests of an engine between two steps, on their way to another engine.

Owns the requests that are held, and the sequences that keep their blocks for the session that takes them over. The loop puts
the requests here where no step is at work; another task hands them over, and puts back what is left.
"""

import asyncio

import structlog

from kvkeeper.client.errors import KvkeeperError

from ..cache_session.kv_memory import KvMemory
from ..outputs.generation import Generation
from ..scheduler.scheduler import Scheduler
from ..values.request import Sequence, TakenBlocks
from .open_requests import OpenRequests

log = structlog.get_logger()


class Leaving:
    """Requests that are held, from begin to end."""

    def __init__(self, scheduler: Scheduler, requests: OpenRequests) -> None:
        self._scheduler, self._requests = scheduler, requests
        self._held: dict[Generation, list[Sequence]] = {}
        self._taken_out = asyncio.Event()
        self.is_wanted = False

    def begin(self) -> None:
        self.is_wanted = True
        self._taken_out.clear()

    @property
    def is_due(self) -> bool:
        """The loop is to take the requests out, as soon as no step is at work."""
        return self.is_wanted and not self._taken_out.is_set()

    def take_out(self, *, keeps_blocks: bool) -> None:
        """No step is at work, or there is no session."""
        self._held = self._requests.take_out(keeps_blocks=keeps_blocks)
        self._taken_out.set()

    async def requests(self) -> list[Generation]:
        """The requests that are held, in order of arrival."""
        await self._taken_out.wait()
        return list(self._held)

    async def offers(self, memory: KvMemory | None, generation: Generation) -> dict[int, bytes]:
        """By index, the offers of a request's sequences that keep their blocks. The cache service knows of all steps."""
        return await offers_of(self._held[generation], memory)

    async def end(self, memory: KvMemory | None) -> None:
        """Release what was not taken, and put back the requests that are still open."""
        for kept in self._held.values():
            await release(self._scheduler, memory, kept)
        for generation in self._held:
            self._requests.put_back(generation)
        self._held = {}
        self.is_wanted = False


async def offers_of(kept: list[Sequence], memory: KvMemory | None) -> dict[int, bytes]:
    """By index, the offers of sequences that keep their blocks. The cache service knows of all steps."""
    found: dict[int, bytes] = {}
    for sequence in kept:
        if memory is not None and sequence.row is not None and sequence.sequence_id is not None:
            try:
                found[sequence.index] = await memory.offer(sequence.sequence_id)
            except KvkeeperError as error:  # it is computed again where it goes
                log.warning("not_offered", request_id=sequence.request.request_id, reason=error.reason)
    return found


async def release(scheduler: Scheduler, memory: KvMemory | None, kept: list[Sequence]) -> None:
    """Let sequences go that kept their blocks; what was not taken is released with the next step."""
    for sequence in kept:
        if memory is None or sequence.row is None or sequence.sequence_id is None:
            continue
        try:
            is_taken = not await memory.withdraw(sequence.sequence_id)
        except KvkeeperError as error:
            log.warning("not_withdrawn", reason=error.reason)
            is_taken = True  # or the end of the session releases it
        scheduler.let_go(sequence, is_taken=is_taken)


async def take_blocks(
    scheduler: Scheduler, memory: KvMemory | None, generation: Generation, offers: dict[int, bytes]
) -> dict[int, TakenBlocks]:
    """By index, the blocks of the continuations that another session offers, as far as it still does."""
    taken: dict[int, TakenBlocks] = {}
    for index, offer in offers.items():
        if memory is not None:
            try:
                taken[index] = await memory.take(offer, scheduler.waiting.draw_id())
            except KvkeeperError as error:  # computed again
                log.info("not_taken", request_id=generation.request.request_id, reason=error.reason)
    return taken
