"""Movement: the requests of one engine that are on their way to another one or wait for it, each in a state of TRANSITIONS.

A request is RUNNING in the engine that computes for it, and in that one alone. Both uses go the same way: an engine takes
over (all requests leave), or an engine computes a prompt for another (the request leaves once it has its first tokens). The
engine that has a prompt computed by another holds the request meanwhile.

Owns which requests left the steps, and the sequences of theirs that keep their blocks for another engine's session. A request
that is still open continues here after put_back. Blocks that were kept and not taken are released by `release`. All calls come
from tasks beside the loop; what takes requests out of the steps runs between two steps.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

import structlog

from kvkeeper.client.errors import KvkeeperError

from ..loop.engine import Engine
from ..outputs.generation import Generation
from ..scheduler.scheduler import NO_BLOCKS
from ..values.errors import EngineError
from ..values.request import Sequence, TakenBlocks


class MoveState(Enum):
    """Where a request is on its way."""

    RUNNING = "running"  # it waits or computes here, as the scheduler says
    LEAVING = "leaving"  # it is to leave the steps, as soon as it may and no step is running
    HELD = "held"  # out of the steps: it computes nothing, and sequences that were running may keep their blocks
    OFFERED = "offered"  # the cache service knows all that was computed, and offers the kept blocks to the other engine
    ENDED = "ended"  # it ended here, or continues in the other engine


_S = MoveState

TRANSITIONS: dict[tuple[MoveState, MoveState], str] = {
    (_S.RUNNING, _S.LEAVING): "another engine takes over, or asked for the prompt alone",
    (_S.RUNNING, _S.HELD): "it is new, and another engine computes its prompt",
    (_S.LEAVING, _S.HELD): "no step is running, or there is no session",
    (_S.LEAVING, _S.RUNNING): "the hand-over was given up",
    (_S.HELD, _S.OFFERED): "its state is sent to the other engine",
    (_S.HELD, _S.RUNNING): "its prompt is computed, or the other engine failed",
    (_S.OFFERED, _S.RUNNING): "the other engine does not want it, or died",
    **{(state, _S.ENDED): "ended, or confirmed by the other engine" for state in (_S.LEAVING, _S.HELD, _S.OFFERED)},
}


log = structlog.get_logger()


class Movement:
    """Requests on their way, from the moment that they are to leave until they continue or have ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._states: dict[Generation, MoveState] = {}  # those that are not RUNNING, in order of arrival
        self._kept: dict[Generation, list[Sequence]] = {}  # sequences that keep their blocks

    # -- away from here

    def leave(self, generations: Iterable[Generation], when: Callable[[], bool] = lambda: True) -> asyncio.Event:
        """Take requests out of the steps, once it may be and no step is running.

        The event is set once they are out, and the cache service knows all that was computed for them.
        """
        leaving = [generation for generation in generations if generation.is_open]
        for generation in leaving:
            self._enter(generation, MoveState.LEAVING)

        def take_out() -> None:
            for generation in leaving:
                if generation.is_open and self._state(generation) is MoveState.LEAVING:
                    self._hold(generation)

        def is_due() -> bool:
            return when() or not any(self._state(generation) is MoveState.LEAVING for generation in leaving)

        return self._engine.between_steps(take_out, is_due)

    def hold(self, generation: Generation) -> None:
        """Queue a new request, or refuse it; nothing is computed for it until put_back. Raises EngineError."""
        self._engine.submit(generation)
        self._hold(generation)

    async def offers(self, generation: Generation) -> dict[int, bytes]:
        """Offer the kept blocks of a held request to another session. Returns the offers of its sequences, by index."""
        self._enter(generation, MoveState.OFFERED)
        found: dict[int, bytes] = {}
        for sequence in self._kept.get(generation, []):
            memory = self._engine.memory
            if memory is not None and sequence.row is not None and sequence.sequence_id is not None:
                try:
                    found[sequence.index] = await memory.offer(sequence.sequence_id)
                except KvkeeperError as error:  # it is computed again where it goes
                    log.warning("not_offered", request_id=generation.request.request_id, reason=error.reason)
        return found

    # -- to here

    async def adopt(self, generation: Generation, offers: Mapping[int, bytes]) -> None:
        """Queue a request of another engine, with the sequences that it offers. Raises EngineError."""
        self._engine.check_open()
        taken = await self.take(generation, offers)
        try:
            self._engine.check_open()
            self._engine.requests.adopt(generation, taken)
        except EngineError:
            self._engine.scheduler.drop_taken(taken)
            raise

    async def take(self, generation: Generation, offers: Mapping[int, bytes]) -> dict[int, TakenBlocks]:
        """The blocks of another engine's sequences by index, as far as they are still offered. Use them at once."""
        memory, taken = self._engine.memory, dict[int, TakenBlocks]()
        for index, offer in offers.items():
            if memory is not None:
                try:
                    taken[index] = await memory.take(offer, self._engine.scheduler.waiting.draw_id())
                except KvkeeperError as error:  # computed again
                    log.info("not_taken", request_id=generation.request.request_id, reason=error.reason)
        return taken if self._engine.memory is memory else {}

    # -- the end of a way

    def put_back(self, generation: Generation, taken: Mapping[int, TakenBlocks] = NO_BLOCKS) -> None:
        """Compute for a request again, if it is still open. taken: blocks from take, in the same turn of the event loop."""
        state = self._enter(generation, MoveState.RUNNING if generation.is_open else MoveState.ENDED)
        if state is not MoveState.LEAVING:
            self._engine.requests.put_back(generation, taken)
        generation.deliver()

    async def release(self, generation: Generation) -> None:
        """Withdraw what is offered of a request. Blocks that were not taken are released with the next step."""
        scheduler = self._engine.scheduler
        for sequence in self._kept.pop(generation, []):
            memory = self._engine.memory
            if memory is None or sequence.row is None or sequence.sequence_id is None:
                continue
            try:
                is_taken = not await memory.withdraw(sequence.sequence_id)
            except KvkeeperError as error:
                log.warning("not_withdrawn", reason=error.reason)
                is_taken = True  # or the end of the session releases it
            scheduler.let_go(sequence, is_taken=is_taken)

    async def close(self, generation: Generation) -> None:
        """Forget a request that has ended here, and release what it kept."""
        if self._state(generation) is not MoveState.RUNNING:
            self._enter(generation, MoveState.ENDED)
        await self.release(generation)

    # -- states

    def _hold(self, generation: Generation) -> None:
        self._enter(generation, MoveState.HELD)
        self._kept[generation] = self._engine.requests.take_out(generation, keeps_blocks=self._engine.memory is not None)

    def _state(self, generation: Generation) -> MoveState:
        return self._states.get(generation, MoveState.RUNNING)

    def _enter(self, generation: Generation, state: MoveState) -> MoveState:
        """Set a request's state. Returns the one before."""
        before = self._state(generation)
        assert (before, state) in TRANSITIONS, f"{before.name} -> {state.name}"
        if state in (MoveState.RUNNING, MoveState.ENDED):
            del self._states[generation]
        else:
            self._states[generation] = state
        return before
