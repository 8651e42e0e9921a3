"""One engine computes a prompt, another on the same cache service the rest: both ends.

Rules: the request lives in the engine that has its client, from the first to the last; its prompt alone is computed elsewhere.
Whatever fails there, the request continues here: with its blocks, or with its first tokens, or from its prompt. An engine that
fails, or refuses, is left alone for a while. In the engine that computes the prompt the request ends once its first tokens are
sent. Its blocks stay until the other engine ends the call: what it has taken is its own by then, the rest is released.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from kvkeeper.client.credentials import Credentials
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.retry import CallOptions
from kvkeeper.client.transport import AsyncTransport
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc

from ..compute.served_model import ServedModel
from ..loop.engine import Engine
from ..messages import make_usage
from ..outputs.generation import Generation
from ..values.errors import Draining, EngineError, InvalidField, RequestFailed, RequestMoved, WrongRole
from ..values.output_chunk import OutputChunk
from ..values.request import TakenBlocks
from .messages import add_outputs, identity, parse_offers, replay, require_same
from .movement import Movement

log = structlog.get_logger()

_FIRST_REST_S, _LONGEST_REST_S = 1.0, 30.0
_PATIENCE_S = 10.0  # for the engine that asked, to take the blocks

Send = Callable[[OutputChunk | EngineError], None]
Queue = Callable[[Generation], Awaitable[None]]
TakeIn = Callable[[pb.GenerateRequest, Queue, Send], Awaitable[Generation]]


@dataclass(slots=True, eq=False)
class _PrefillEngine:
    """An engine that computes prompts. rest_until: seconds of time.monotonic."""

    transport: AsyncTransport
    num_asked: int = 0  # prompts that it computes now
    rest_until: float = 0.0
    next_rest_s: float = _FIRST_REST_S

    def note_failure(self) -> None:
        self.rest_until = time.monotonic() + self.next_rest_s
        self.next_rest_s = min(2 * self.next_rest_s, _LONGEST_REST_S)

    def note_success(self) -> None:
        self.next_rest_s = _FIRST_REST_S


@dataclass(slots=True, eq=False)
class _RemotePrompt:
    """A prompt that another engine computes. has_answer: the rest is short, and is not given up."""

    task: asyncio.Task[None]
    has_answer: bool = False


class RemotePrefill:
    """Has long prompts computed by other engines."""

    def __init__(
        self,
        targets: Sequence[str],
        min_tokens: int,
        timeout_s: float,
        model: ServedModel,
        engine: Engine,
        movement: Movement,
        credentials: Credentials,
    ) -> None:
        """targets: engines to ask; none: all prompts are computed here. min_tokens: of a prompt that is worth asking for."""
        self._min_tokens, self._model, self._stats, self._movement = min_tokens, model, engine.stats, movement
        options, stub = CallOptions(timeout_s=timeout_s, retry_s=0.0), pb_grpc.EngineServiceStub
        self._engines = [_PrefillEngine(AsyncTransport(target, options, stub, credentials)) for target in targets]
        self._prompts: dict[Generation, _RemotePrompt] = {}

    def begin(self, generation: Generation, make_message: Callable[[Generation], pb.GenerateRequest]) -> bool:
        """Take a new request in and have its prompt computed, where an engine is free to; False: nothing was done.

        make_message: gives the request's message, as it is carried out. Raises EngineError where the request is refused.
        """
        engine = self._find(generation)
        if engine is None:
            return False
        self._movement.hold(generation)
        task = asyncio.create_task(self._compute(engine, generation, make_message(generation)))
        self._prompts[generation] = _RemotePrompt(task)
        engine.num_asked += 1  # now: many requests may come before a task begins

        def ended(_: asyncio.Task[None]) -> None:
            engine.num_asked -= 1
            self._end(generation, {})  # one that is cancelled before it begins runs nothing

        task.add_done_callback(ended)
        return True

    def drop(self, generation: Generation) -> None:
        """The request has ended: its prompt is not needed any more."""
        prompt = self._prompts.get(generation)
        if prompt is not None and not prompt.has_answer:
            prompt.task.cancel()

    async def give_up(self) -> None:
        """The prompts are computed here, as far as there is no answer yet. Returns once no request is on its way."""
        while self._prompts:
            for generation in list(self._prompts):
                self.drop(generation)
            await asyncio.wait([prompt.task for prompt in self._prompts.values()])

    async def close(self) -> None:
        await self.give_up()
        for engine in self._engines:
            await engine.transport.close()

    def _find(self, generation: Generation) -> _PrefillEngine | None:
        """The engine to ask for a prompt; None: it is computed here."""
        if not self._engines or generation.sends_all_at_the_end or len(generation.request.prompt) < self._min_tokens:
            return None
        now = time.monotonic()
        ready = [engine for engine in self._engines if engine.rest_until <= now]
        return min(ready, key=lambda engine: engine.num_asked, default=None)

    async def _compute(self, engine: _PrefillEngine, generation: Generation, message: pb.GenerateRequest) -> None:
        taken: dict[int, TakenBlocks] = {}
        request = pb.PrefillRequest(engine=identity(self._model), request=message)
        call = engine.transport.stream(engine.transport.stub.Prefill, request)
        failure = ""
        try:
            answer = await anext(call)
            self._prompts[generation].has_answer = True
            if answer.HasField("request"):
                taken = await self._continue(generation, answer.request)
            else:
                generation.request.num_hit_tokens = answer.usage.cached_tokens  # what it finds now, it has computed itself
            engine.note_success()
            self._stats.num_remote_prefills += 1
        except KvkeeperError as error:
            failure = error.reason or error.code.name
        except StopAsyncIteration:
            failure = "NO_ANSWER"
        except EngineError as error:
            if generation.is_open:
                failure = error.reason
                generation.fail(RequestFailed("the engine that computed the prompt sent something else"))
        finally:
            if failure:
                engine.note_failure()
                self._stats.num_failed_remote_prefills += 1
                log.warning("prompt_not_computed_elsewhere", request_id=generation.request.request_id, reason=failure)
            self._end(generation, taken)
            call.cancel()

    def _end(self, generation: Generation, taken: dict[int, TakenBlocks]) -> None:
        if self._prompts.pop(generation, None) is not None:
            self._movement.put_back(generation, taken)

    async def _continue(self, generation: Generation, handed: pb.HandedRequest) -> dict[int, TakenBlocks]:
        """The first tokens become this request's. Its blocks, by index. Raises EngineError."""
        await replay(handed, self._model.vocab_size, generation)
        self._stats.time_first_tokens(generation)
        generation.deliver()
        return await self._movement.take(generation, parse_offers(handed))


class PrefillServer:
    """The call Prefill: computes prompts of other engines' requests, and offers these engines the blocks."""

    def __init__(self, role: str, model: ServedModel, engine: Engine, movement: Movement, take_in: TakeIn) -> None:
        """take_in: makes a request of a message, has it queued, and sends what comes of it. Raises EngineError."""
        self._role, self._model, self._engine, self._movement = role, model, engine, movement
        self._take_in = take_in
        self._open: set[Generation] = set()
        self._releasing: set[asyncio.Task[None]] = set()

    async def prefill(self, request: pb.PrefillRequest) -> AsyncIterator[pb.PrefillResponse]:
        if self._role == "decode":
            raise WrongRole("this engine computes no prompts for others (--role decode)", role=self._role)
        require_same(self._model, request.engine)
        has_ended = asyncio.Event()

        def note_end(output: OutputChunk | EngineError) -> None:
            if isinstance(output, EngineError) or output.usage is not None:
                has_ended.set()

        generation = await self._take_in(request.request, self._queue, note_end)
        self._open.add(generation)
        has_left = self._movement.leave([generation], when=lambda: _has_first_tokens(generation))
        try:
            await _wait_for_either(has_left, has_ended)
            if generation.is_open:
                yield pb.PrefillResponse(request=await self._handed(generation))
                await asyncio.sleep(_PATIENCE_S)
            elif generation.refusal is not None:
                raise generation.refusal
            else:
                yield pb.PrefillResponse(usage=make_usage(generation.usage))
        finally:
            self._open.discard(generation)
            generation.fail(RequestMoved("the request goes on in the engine that asked"))
            task = asyncio.create_task(self._movement.close(generation))
            self._releasing.add(task)  # a call that is ended waits for nothing
            task.add_done_callback(self._releasing.discard)

    def end_all(self) -> None:
        """Another engine takes this one's place: the engines that asked compute these prompts themselves."""
        for generation in list(self._open):
            generation.fail(Draining("another engine takes over"))

    async def _queue(self, generation: Generation) -> None:
        if generation.sends_all_at_the_end:
            raise InvalidField("request: has no first tokens before its last", field="request")
        self._engine.submit(generation)

    async def _handed(self, generation: Generation) -> pb.HandedRequest:
        """The request with its first tokens; the engine that asked has its message, and knows how old it is."""
        handed = pb.HandedRequest(request=pb.GenerateRequest(request_id=generation.request.request_id))
        add_outputs(handed, generation, await self._movement.offers(generation))
        return handed


def _has_first_tokens(generation: Generation) -> bool:
    request = generation.request
    return all(generation.count_taken(index) for index in range(request.n)) and not request.unforked


async def _wait_for_either(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
