"""Prefilled: requests that leave the steps once each continuation has a token, for the engine that asked for their prompts.

Owns which requests are to leave, and the sequences of those that left, which keep their blocks until they are let go. The loop
takes a request out where no step is at work; the task that answers the other engine waits for that.
"""

import asyncio

from ..cache_session.kv_memory import KvMemory
from ..outputs.generation import Generation
from ..scheduler.scheduler import Scheduler
from ..values.request import Sequence
from .leaving import offers_of, release
from .open_requests import OpenRequests


class Prefilled:
    """Requests of which this engine computes the prompt, and another one the rest."""

    def __init__(self, scheduler: Scheduler, requests: OpenRequests) -> None:
        self._scheduler, self._requests = scheduler, requests
        self._in_steps: dict[Generation, asyncio.Event] = {}
        self._kept: dict[Generation, list[Sequence]] = {}
        self._unreported: list[asyncio.Event] = []

    def add(self, generation: Generation) -> asyncio.Event:
        """Have an open request leave. The event is set once it is out, and the cache service knows all that was computed."""
        event = self._in_steps[generation] = asyncio.Event()
        return event

    @property
    def is_due(self) -> bool:
        """The loop is to take requests out, as soon as no step is at work."""
        return any(_has_first_tokens(generation) for generation in self._in_steps)

    def take_out(self) -> None:
        """No step is at work."""
        for generation in [each for each in self._in_steps if _has_first_tokens(each)]:
            self._unreported.append(self._in_steps.pop(generation))
            self._kept[generation] = self._requests.hold(generation, keeps_blocks=True)

    def note_reported(self) -> None:
        """A step was answered, or there was nothing to report: the cache service knows what these requests computed."""
        for event in self._unreported:
            event.set()
        self._unreported.clear()

    async def offers(self, memory: KvMemory | None, generation: Generation) -> dict[int, bytes]:
        """By index, the offers of the continuations that keep their blocks."""
        return await offers_of(self._kept.get(generation, []), memory)

    async def let_go(self, memory: KvMemory | None, generation: Generation) -> None:
        """The request is over here; blocks that were not taken are released."""
        self._in_steps.pop(generation, None)
        await release(self._scheduler, memory, self._kept.pop(generation, []))


def _has_first_tokens(generation: Generation) -> bool:
    request = generation.request
    has_all = all(generation.num_taken_of(index) for index in range(request.n))
    return generation.is_open and has_all and not request.unforked
