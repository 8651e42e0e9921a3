"""HandOvers: gives this engine's open requests to an engine that takes its place. taker.py is the other end.

Rules: a request goes on in one engine alone. It computes nothing while it is on its way. The taker queues it first; then it
confirms, and the request ends here with REQUEST_MOVED. A request that is not confirmed goes on here, from the tokens that it
has. Sequences that run are offered to the taker's session, so that their blocks go along.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ...compute.served_model import ServedModel
from ...loop.engine import Engine
from ...outputs.generation import Generation
from ...values.errors import HandOverUnderWay, InvalidField, RequestMoved, TimedOut, UnknownRequest
from ..admission import Admission
from ..identity import require_same
from ..submissions import Submissions
from .handed_request import handed_request

log = structlog.get_logger()

_MAX_ADDRESS_CHARS = 256
_PATIENCE_S = 10.0  # for the next request that is confirmed


@dataclass(slots=True, eq=False)
class _HandOver:
    """One hand-over under way, to the engine at `address`."""

    address: str
    hand_over_id: str = field(default_factory=lambda: secrets.token_hex(16))
    unanswered: dict[str, Generation] = field(default_factory=dict)  # by request id
    moved: set[str] = field(default_factory=set)
    left: list[Generation] = field(default_factory=list)  # that go on here: the taker does not want them
    progress: asyncio.Event = field(default_factory=asyncio.Event)


class HandOvers:
    """The calls HandOver and ConfirmHandOver; one hand-over at a time."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        admission: Admission,
        submissions: Submissions,
        settle: Callable[[], Awaitable[None]],
        leave: Callable[[], Awaitable[None]],
    ) -> None:
        """settle: ends what other engines compute for this one, and the reverse.

        leave: stops this engine, once its last request has ended.
        """
        self._model, self._engine, self._admission, self._submissions = model, engine, admission, submissions
        self._settle, self._leave = settle, leave
        self._current: _HandOver | None = None

    async def hand_over(self, request: pb.HandOverRequest) -> AsyncIterator[pb.HandOverResponse]:
        self._check(request)
        current = self._current = _HandOver(request.address)
        log.info("handing_over", address=request.address, num_requests=len(self._engine.requests.generations))
        is_done = False
        try:
            yield pb.HandOverResponse(hand_over_id=current.hand_over_id)
            await self._settle()
            current.unanswered = {each.request.request_id: each for each in await self._engine.hold_requests()}
            for request_id, generation in list(current.unanswered.items()):
                if generation.is_open:
                    digest = self._submissions.digest_of(request_id)
                    offers = await self._engine.leaving.offers(self._engine.memory, generation)
                    if not generation.is_open:
                        del current.unanswered[request_id]
                        continue
                    message = self._admission.message_of(generation)
                    yield pb.HandOverResponse(request=handed_request(generation, message, digest, offers))
                else:
                    del current.unanswered[request_id]
            await self._wait_answers(current)
            is_done = True
        finally:
            self._current = None
            await self._engine.go_on()
            left = sum(generation.is_open for generation in (*current.left, *current.unanswered.values()))
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
            current.left.append(generation)
        return pb.ConfirmHandOverResponse()

    async def _wait_answers(self, current: _HandOver) -> None:
        """Until each request is answered or has ended. Raises TimedOut."""
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
