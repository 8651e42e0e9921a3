"""PromptsForOthers: computes prompts of other engines' requests, and offers them the blocks. by_others.py is the other end.

Rules: the request has its client in the engine that asked, so nothing of it is told here. It is over here once its first tokens
are sent there. Its blocks stay until that engine ends the call: what it has taken is its own by then, the rest is released.
"""

import asyncio
from collections.abc import AsyncIterator

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ...compute.served_model import ServedModel
from ...loop.engine import Engine
from ...outputs.generation import Generation
from ...values.errors import Draining, EngineError, RequestMoved, WrongRole
from ...values.output_chunk import OutputChunk
from ..admission import Admission
from ..encode_chunk import usage_of
from ..hand_over.handed_request import handed_request
from ..identity import require_same

_PATIENCE_S = 10.0  # for the engine that asked, to take the blocks


class PromptsForOthers:
    """The call Prefill."""

    def __init__(self, role: str, model: ServedModel, engine: Engine, admission: Admission) -> None:
        self._role, self._model, self._engine, self._admission = role, model, engine, admission
        self._open: set[Generation] = set()
        self._releasing: set[asyncio.Task[None]] = set()

    async def prefill(self, request: pb.PrefillRequest) -> AsyncIterator[pb.PrefillResponse]:
        if self._role == "decode":
            raise WrongRole("this engine computes no prompts for others (--role decode)", role=self._role)
        require_same(self._model, request.engine)
        ended: asyncio.Future[EngineError | None] = asyncio.get_running_loop().create_future()

        def note_end(output: OutputChunk | EngineError) -> None:
            if isinstance(output, EngineError):
                ended.set_result(output)
            elif output.usage is not None:
                ended.set_result(None)

        generation = await self._admission.admit_prompt(request.request, note_end)
        self._open.add(generation)
        try:
            leaving = asyncio.ensure_future(self._engine.prefilled.add(generation).wait())
            try:
                await asyncio.wait((leaving, ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
            if not ended.done():
                yield pb.PrefillResponse(request=await self._handed(generation))
                await asyncio.sleep(_PATIENCE_S)
            elif (error := ended.result()) is not None:
                raise error
            else:
                yield pb.PrefillResponse(usage=usage_of(generation.usage))
        finally:
            self._open.discard(generation)
            generation.fail(RequestMoved("the request goes on in the engine that asked"))
            task = asyncio.create_task(self._engine.prefilled.let_go(self._engine.memory, generation))
            self._releasing.add(task)  # a call that is ended waits for nothing
            task.add_done_callback(self._releasing.discard)

    def end_all(self) -> None:
        """Another engine takes this one's place: the engines that asked compute these prompts themselves."""
        for generation in list(self._open):
            generation.fail(Draining("another engine takes over"))

    async def _handed(self, generation: Generation) -> pb.HandedRequest:
        """The request with its first tokens; the engine that asked has its message, and knows how old it is."""
        offers = await self._engine.prefilled.offers(self._engine.memory, generation)
        handed = handed_request(generation, pb.GenerateRequest(request_id=generation.request.request_id), b"", offers)
        handed.ClearField("age_ms")
        handed.ClearField("first_token_ms")
        return handed
