"""take_over: goes on with the requests of an engine whose place this one takes. giver.py is the other end.

Each request is queued here first, then confirmed there. A request that the other engine does not give up is dropped here. Where
the other engine dies before it answers, the request goes on here.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import structlog

from kvkeeper.client.errors import KvkeeperError
from kvkeeper.client.retry import CallOptions
from kvkeeper.client.transport import AsyncTransport
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine.v1 import engine_service_pb2_grpc as pb_grpc

from ...values.errors import EngineError
from ..admission import Admission
from ..submissions import Submissions
from .handed_request import replay

log = structlog.get_logger()

_CALL = CallOptions(timeout_s=10.0, retry_s=5.0)
_PATIENCE_S = 2.0  # with an engine that does not answer, or that hands over to another one


class TakeOverRefused(Exception):
    """The other engine will never hand over to this one. One line."""


@dataclass(frozen=True, slots=True)
class Taker:
    """Takes requests in. client_grace: seconds that a stream waits here for its client."""

    admission: Admission
    submissions: Submissions
    vocab_size: int
    client_grace: float

    async def take(self, transport: AsyncTransport, hand_over_id: str, handed: pb.HandedRequest) -> bool:
        """Go on with one request, if it fits here and is given up there. Raises KvkeeperError when the other engine is gone."""
        request_id = handed.request.request_id
        confirmation = pb.ConfirmHandOverRequest(hand_over_id=hand_over_id, request_id=request_id)
        try:
            offers = {index: output.offer for index, output in enumerate(handed.outputs) if output.offer}
            bring_on = partial(replay, handed, self.vocab_size)
            admit = partial(self.admission.adopt, handed.request, bring_on, offers)
            submission = await self.submissions.adopt(request_id, handed.submission_digest, admit)
        except EngineError as error:
            log.warning("request_not_taken", request_id=request_id, reason=error.reason, message=str(error))
            await transport.call(transport.stub.ConfirmHandOver, confirmation)
            return False
        if not handed.submission_digest:
            submission.wait_for_client(self.client_grace)
        confirmation.is_taken = True
        try:
            await transport.call(transport.stub.ConfirmHandOver, confirmation)
        except KvkeeperError as error:
            if not error.reason:
                raise  # the other engine died, or may have given it up without our hearing of it
            self.submissions.drop(request_id)
            return False
        return True


async def take_over(target: str, request: pb.HandOverRequest, taker: Taker) -> None:
    """Take over what the engine at target has; one that is gone has nothing. Raises TakeOverRefused.

    request: tells that engine of this one.
    """
    transport = AsyncTransport(target, _CALL, pb_grpc.EngineServiceStub)
    hand_over_id, num_taken = "", 0
    try:
        answers = transport.stream(transport.stub.HandOver, request, replace(_CALL, timeout_s=math.inf, retry_s=_PATIENCE_S))
        async for answer in answers:
            hand_over_id = answer.hand_over_id or hand_over_id
            if answer.HasField("request"):
                num_taken += await taker.take(transport, hand_over_id, answer.request)
    except KvkeeperError as error:
        if not hand_over_id and not error.service_down:
            raise TakeOverRefused(str(error)) from None
        event = "take_over_cut_short" if hand_over_id else "nothing_to_take_over"
        log.warning(event, address=target, num_requests=num_taken, code=error.code.name, reason=error.reason)
    else:
        log.info("taken_over", address=target, num_requests=num_taken)
    finally:
        await transport.close()
