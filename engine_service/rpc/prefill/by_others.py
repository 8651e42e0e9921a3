"""PromptsByOthers: has long prompts computed by other engines, on the same cache service. for_others.py is the other end.

Rules: the request lives here from the first to the last; only its prompt is computed elsewhere. Whatever fails there, the
request goes on here: with its blocks, or with its first tokens, or from its prompt. An engine that fails, or refuses, is left
alone for a while.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from kvkeeper.client.credentials import Credentials
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.retry import CallOptions
from kvkeeper.client.transport import AsyncTransport
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc

from ...compute.served_model import ServedModel
from ...loop.engine import Engine
from ...outputs.generation import Generation
from ...values.errors import EngineError, RequestFailed
from ...values.request import TakenBlocks
from ..hand_over.handed_request import replay
from ..identity import identity

log = structlog.get_logger()

_FIRST_REST_S, _LONGEST_REST_S = 1.0, 30.0


@dataclass(slots=True, eq=False)
class _Helper:
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
class _Asked:
    """A prompt that another engine computes. has_answer: the rest is short, and is not given up."""

    task: asyncio.Task[None]
    has_answer: bool = False


class PromptsByOthers:
    """The prompts that other engines compute for this one now."""

    def __init__(
        self,
        targets: Sequence[str],
        min_tokens: int,
        timeout_s: float,
        model: ServedModel,
        engine: Engine,
        credentials: Credentials,
    ) -> None:
        """targets: engines to ask; none: all prompts are computed here. min_tokens: of a prompt that is worth asking for."""
        self._min_tokens, self._model, self._engine = min_tokens, model, engine
        self._options = CallOptions(timeout_s=timeout_s, retry_s=0.0)
        stub = pb_grpc.EngineServiceStub
        self._helpers = [_Helper(AsyncTransport(target, self._options, stub, credentials)) for target in targets]
        self._asked: dict[Generation, _Asked] = {}

    def ask(self, generation: Generation, message_of: Callable[[Generation], pb.GenerateRequest]) -> bool:
        """Take a new request in and have its prompt computed, where an engine is free to; False: nothing was done.

        message_of: gives the request's message, as it is carried out. Raises EngineError where the request is refused.
        """
        helper = self._find(generation)
        if helper is None:
            return False
        self._engine.hold(generation)
        task = asyncio.create_task(self._compute(helper, generation, message_of(generation)))
        self._asked[generation] = _Asked(task)
        helper.num_asked += 1  # now: many requests may come before a task begins

        def ended(_: asyncio.Task[None]) -> None:
            helper.num_asked -= 1
            self._end(generation, {})  # one that is cancelled before it begins runs nothing

        task.add_done_callback(ended)
        return True

    def drop(self, generation: Generation) -> None:
        """The request has ended: its prompt is not needed any more."""
        asked = self._asked.get(generation)
        if asked is not None and not asked.has_answer:
            asked.task.cancel()

    async def give_up(self) -> None:
        """The prompts are computed here, as far as there is no answer yet. Returns once no request is on its way."""
        while self._asked:
            for generation in list(self._asked):
                self.drop(generation)
            await asyncio.wait([asked.task for asked in self._asked.values()])

    async def close(self) -> None:
        await self.give_up()
        for helper in self._helpers:
            await helper.transport.close()

    def _find(self, generation: Generation) -> _Helper | None:
        """The engine to ask for a prompt; None: it is computed here."""
        if not self._helpers or generation.sends_all_at_the_end or len(generation.request.prompt) < self._min_tokens:
            return None
        now = time.monotonic()
        ready = [helper for helper in self._helpers if helper.rest_until <= now]
        return min(ready, key=lambda helper: helper.num_asked, default=None)

    async def _compute(self, helper: _Helper, generation: Generation, message: pb.GenerateRequest) -> None:
        taken: dict[int, TakenBlocks] = {}
        request = pb.PrefillRequest(engine=identity(self._model), request=message)
        call = helper.transport.stream(helper.transport.stub.Prefill, request)
        try:
            answer = await anext(call)
            self._asked[generation].has_answer = True
            if answer.HasField("request"):
                taken = await self._go_on(generation, answer.request)
            else:
                generation.request.num_hit_tokens = answer.usage.cached_tokens  # what it finds now, it has computed itself
            helper.note_success()
            self._engine.stats.num_remote_prefills += 1
        except KvkeeperError as error:
            helper.note_failure()
            self._note_failure(generation, error.reason or error.code.name)
        except StopAsyncIteration:
            helper.note_failure()
            self._note_failure(generation, "NO_ANSWER")
        except EngineError as error:
            if generation.is_open:
                helper.note_failure()
                self._note_failure(generation, error.reason)
                generation.fail(RequestFailed("the engine that computed the prompt sent something else"))
        finally:
            self._end(generation, taken)
            call.cancel()

    def _end(self, generation: Generation, taken: dict[int, TakenBlocks]) -> None:
        if self._asked.pop(generation, None) is not None:
            self._engine.put_back(generation, taken)

    async def _go_on(self, generation: Generation, handed: pb.HandedRequest) -> dict[int, TakenBlocks]:
        """The first tokens become this request's. Its blocks, by index. Raises EngineError."""
        await replay(handed, self._model.vocab_size, generation)
        self._engine.stats.time_first_tokens(generation)
        generation.deliver()
        offers = {index: output.offer for index, output in enumerate(handed.outputs) if output.offer}
        return await self._engine.take(generation, offers)

    def _note_failure(self, generation: Generation, reason: str) -> None:
        self._engine.stats.num_failed_remote_prefills += 1
        log.warning("prompt_not_computed_elsewhere", request_id=generation.request.request_id, reason=reason)
