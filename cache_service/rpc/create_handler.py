"""Creates: prompts in, and for each its answer or its refusal out, whatever carries them.

Several prompts of one request are created one by one, with turns between them; most requests need none, and then no task is
made for them. Idempotent by ids and arguments, so nothing is recorded for a repeat.
"""

from collections.abc import Awaitable, Iterator

from kvkeeper.cache.v1 import cache_service_pb2 as pb

from ..core.values.errors import CacheError
from ..runtime.live_session import LiveSession
from ..runtime.session_manager import SessionManager
from ..runtime.turns import Turns
from .convert.checks import check_range
from .convert.sequences import sequence_args
from .ownership import check_own, own_session
from .status import REFUSALS

_MOST_CREATED = 256  # in one request


class CreateHandler:
    """Creates sequences in the pools of their sessions."""

    def __init__(self, session_manager: SessionManager) -> None:
        self._session_manager = session_manager

    async def create_sequence(self, request: pb.CreateSequenceRequest) -> pb.CreateSequenceResponse:
        return _create(own_session(self._session_manager, request), request)

    async def create_sequences(self, request: pb.CreateSequencesRequest) -> pb.CreateSequencesResponse:
        check_own(self._session_manager, request)
        answer = self.create_some(request)
        return answer if isinstance(answer, pb.CreateSequencesResponse) else await answer

    def create_some(
        self, request: pb.CreateSequencesRequest
    ) -> pb.CreateSequencesResponse | Awaitable[pb.CreateSequencesResponse]:
        """The answer; awaitable where it lets others pass. Raises CacheError."""
        check_range("sequences", len(request.sequences), 1, _MOST_CREATED)
        answer, turns = pb.CreateSequencesResponse(), Turns(pause=0)
        each = self._create_each(request, answer)
        for _ in each:
            if turns.is_due:
                return _create_rest(each, turns, answer)
        return answer

    def _create_each(self, request: pb.CreateSequencesRequest, answer: pb.CreateSequencesResponse) -> Iterator[None]:
        """Adds a result to the answer before each pause. Raises CacheError for what is none of a sequence's."""
        for sequence in request.sequences:
            live = self._session_manager.require(request.session_id, request.epoch)  # it may have ended while others passed
            try:
                created = _create(live, sequence)
            except CacheError as refusal:
                answer.results.add(error=REFUSALS.to_status(refusal).SerializeToString())
            else:
                answer.results.add(response=created)
            yield


async def _create_rest(each: Iterator[None], turns: Turns, answer: pb.CreateSequencesResponse) -> pb.CreateSequencesResponse:
    await turns.offer()
    for _ in each:
        await turns.offer()
    return answer


def _create(live: LiveSession, request: pb.CreateSequenceRequest | pb.NewSequence) -> pb.CreateSequenceResponse:
    args = sequence_args(request)
    num_matched = live.pool.manager.creation.create(live.core.id, args)
    start_number = live.pool.manager.queries.start_number(live.core.id, args.sequence_id)
    return pb.CreateSequenceResponse(num_matched_tokens=num_matched, start_number=start_number)
