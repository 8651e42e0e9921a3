"""One engine takes the place of another: both ends.

Rules: a request is computed in one engine alone, and not at all while it is on its way. The engine that takes over queues it
first and then confirms it; the request ends in the other one with REQUEST_MOVED. A request that is not confirmed continues
where it was, from the tokens that it has. A request that the other engine does not give up is dropped by the one that takes
over; where the other engine dies before it has replied, the request continues here. Sequences that run are offered to the
session of the engine that takes over, so that their blocks go along.
"""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import structlog

from kvkeeper.client.credentials import Credentials
from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.retry import CallOptions
from kvkeeper.client.transport import AsyncTransport
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc

from ..compute.served_model import ServedModel
from ..loop.engine import Engine
from ..outputs.generation import Generation
from ..values.errors import EngineError, HandOverUnderWay, InvalidField, RequestMoved, TimedOut, UnknownRequest
from .messages import add_age, add_outputs, identity, parse_offers, replay, require_same
from .movement import Movement

log = structlog.get_logger()

_MAX_ADDRESS_CHARS = 256
_PATIENCE_S = 10.0  # for the next request that is confirmed
_CALL = CallOptions(timeout_s=10.0, retry_s=5.0)
_RETRY_S = 2.0  # with an engine that does not answer, or that hands over to another one

Queue = Callable[[Generation], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Handover:
    """A hand-over that runs, to the engine at `address`."""

    address: str
    hand_over_id: str = field(default_factory=lambda: secrets.token_hex(16))
    unanswered: dict[str, Generation] = field(default_factory=dict)  # by request id
    moved: set[str] = field(default_factory=set)
    refused: list[Generation] = field(default_factory=list)  # by the other engine: they continue here
    progress: asyncio.Event = field(default_factory=asyncio.Event)


class RequestHandover:
    """The calls HandOver and ConfirmHandOver; one hand-over at a time."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        movement: Movement,
        make_message: Callable[[Generation], pb.HandedRequest],
        settle: Callable[[], Awaitable[None]],
        leave: Callable[[], Awaitable[None]],
    ) -> None:
        """make_message: what a client asked for. settle: ends what other engines compute for this one, and the reverse.

        leave: stops this engine, once its last request has ended.
        """
        self._model, self._engine, self._movement = model, engine, movement
        self._make_message, self._settle, self._leave = make_message, settle, leave
        self._current: _Handover | None = None

    async def hand_over(self, request: pb.HandOverRequest) -> AsyncIterator[pb.HandOverResponse]:
        self._check(request)
        current = self._current = _Handover(request.address)
        log.info("handing_over", address=request.address, num_requests=len(self._engine.requests.generations))
        is_done, open_requests = False, list[Generation]()
        try:
            yield pb.HandOverResponse(hand_over_id=current.hand_over_id)
            await self._settle()
            self._engine.is_handing_over = True
            open_requests = list(self._engine.requests.generations.values())
            await self._movement.leave(open_requests).wait()
            current.unanswered = {each.request.request_id: each for each in open_requests if each.is_open}
            for request_id, generation in list(current.unanswered.items()):
                offers = await self._movement.offers(generation) if generation.is_open else {}
                if not generation.is_open:
                    del current.unanswered[request_id]
                    continue
                handed = self._make_message(generation)
                add_age(handed, generation)
                add_outputs(handed, generation, offers)
                yield pb.HandOverResponse(request=handed)
            await self._wait_answers(current)
            is_done = True
        finally:
            self._current = None
            await self._continue(open_requests)
            left = sum(generation.is_open for generation in (*current.refused, *current.unanswered.values()))
            log.info("handed_over" if is_done else "hand_over_failed", num_requests=len(current.moved), num_left=left)
        await self._leave()

    async def confirm_hand_over(self, request: pb.ConfirmHandOverRequest) -> pb.ConfirmHandOverResponse:
        current = self._current
        if current is None or not secrets.compare_digest(request.hand_over_id, current.hand_over_id):
            raise UnknownRequest("there is no such hand-over")
        if request.request_id in current.moved:
            return pb.ConfirmHandOverResponse()
        generation = current.unanswered.pop(request.request_id, None)
        current.progress.set()
        if generation is None or not generation.is_open:
            raise UnknownRequest("the request has ended")
        if request.is_taken:
            current.moved.add(request.request_id)
            address, request_id = current.address, request.request_id
            generation.fail(RequestMoved("the request goes on in another engine", address=address, request_id=request_id))
        else:
            current.refused.append(generation)
        return pb.ConfirmHandOverResponse()

    async def _continue(self, generations: list[Generation]) -> None:
        """Compute for the requests that are still open, and take new ones."""
        for generation in generations:
            await self._movement.release(generation)
        for generation in generations:
            self._movement.put_back(generation)
        self._engine.is_handing_over = False

    async def _wait_answers(self, current: _Handover) -> None:
        """Wait until each request has its answer or has ended. Raises TimedOut."""
        while any(generation.is_open for generation in current.unanswered.values()):
            current.progress.clear()
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await current.progress.wait()
            except TimeoutError:
                timeout_ms = int(_PATIENCE_S * 1000)
                raise TimedOut(f"no request was confirmed for {timeout_ms} ms", timeout_ms=timeout_ms) from None

    def _check(self, request: pb.HandOverRequest) -> None:
        """Raises InvalidField, ForeignEngine, HandOverUnderWay."""
        if not 1 <= len(request.address) <= _MAX_ADDRESS_CHARS:
            raise InvalidField(f"address: 1 to {_MAX_ADDRESS_CHARS} characters", field="address", limit=_MAX_ADDRESS_CHARS)
        require_same(self._model, request.engine)
        if self._current is not None:
            raise HandOverUnderWay("the requests are being handed over to another engine")


class TakeOverRefused(Exception):
    """The other engine will never hand over to this one. One line."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Takes over the requests of another engine.

    admit: has a request queued, and remembers it for its client. Raises EngineError. drop: ends and forgets it.
    """

    model: ServedModel
    movement: Movement
    admit: Callable[[pb.HandedRequest, Queue], Awaitable[None]]
    drop: Callable[[str], None]

    async def run(self, target: str, address: str, credentials: Credentials) -> None:
        """Take over what the engine at target has; one that is gone has nothing. address: of this engine, for clients.

        Raises TakeOverRefused.
        """
        request = pb.HandOverRequest(address=address, engine=identity(self.model))
        transport = AsyncTransport(target, _CALL, pb_grpc.EngineServiceStub, credentials)
        hand_over_id, num_taken = "", 0
        try:
            options = replace(_CALL, timeout_s=math.inf, retry_s=_RETRY_S)
            async for answer in transport.stream(transport.stub.HandOver, request, options):
                hand_over_id = answer.hand_over_id or hand_over_id
                if answer.HasField("request"):
                    num_taken += await self._take(transport, hand_over_id, answer.request)
        except KvkeeperError as error:
            if not hand_over_id and not error.service_down:
                raise TakeOverRefused(str(error)) from None
            event = "take_over_cut_short" if hand_over_id else "nothing_to_take_over"
            log.warning(event, address=target, num_requests=num_taken, code=error.code.name, reason=error.reason)
        else:
            log.info("taken_over", address=target, num_requests=num_taken)
        finally:
            await transport.close()

    async def _take(self, transport: AsyncTransport, hand_over_id: str, handed: pb.HandedRequest) -> bool:
        """Continue with one request, if it fits here and is given up there. Raises KvkeeperError when that engine is gone."""
        request_id = handed.request.request_id
        confirmation = pb.ConfirmHandOverRequest(hand_over_id=hand_over_id, request_id=request_id)

        async def queue(generation: Generation) -> None:
            await replay(handed, self.model.vocab_size, generation)
            await self.movement.adopt(generation, parse_offers(handed))
            generation.deliver()

        try:
            await self.admit(handed, queue)
        except EngineError as error:
            log.warning("request_not_taken", request_id=request_id, reason=error.reason, message=str(error))
            await transport.call(transport.stub.ConfirmHandOver, confirmation)
            return False
        confirmation.is_taken = True
        try:
            await transport.call(transport.stub.ConfirmHandOver, confirmation)
        except KvkeeperError as error:
            if not error.reason:
                raise  # the other engine died, or may have given it up without our hearing of it
            self.drop(request_id)
            return False
        return True
